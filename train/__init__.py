"""Training: entry points, and what they run. XLA's and TensorStore's C++ log lines stay off stderr."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read when jax is first imported, which sets it to 1 itself
