"""A report as report.md and as report.html, one self-contained page, with the figures beside them as PNG files."""

import base64
import functools
import html
import json
import pathlib
import platform
import subprocess
from typing import Any, NamedTuple

import jax
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #1b1f24; }
h2 { margin-top: 2em; font-size: 1.15em; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: .35em .6em; border-bottom: 1px solid #d8dee4; vertical-align: top; }
th { background: #f6f8fa; } tr:hover td { background: #f6f8fa; }
td:first-child { white-space: nowrap; }
figure { margin: 1.5em 0; } img { max-width: 100%; } figcaption { color: #57606a; font-size: 13px; }
pre { background: #f6f8fa; padding: 1em; overflow-x: auto; font-size: 12px; }
"""


class Table(NamedTuple):
    """Cells are text; every row has one per column."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


class Figure(NamedTuple):
    """file: the name of a PNG in the report's directory."""

    caption: str
    file: str


def save(figure: Any, path: pathlib.Path, caption: str) -> Figure:
    """Write a drawn figure as PNG and close it."""
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return Figure(caption, path.name)


@functools.cache
def commit() -> str:
    """Return the commit of the working directory, with -dirty where it was changed, "unknown" outside of git."""
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def provenance() -> dict[str, Any]:
    """Return what produced a report: commit, versions, device, and whether FP4 was emulated."""
    return {
        "commit": commit(),
        "jax": jax.__version__,
        "device": f"{jax.devices()[0].device_kind}, {platform.machine()}",
        "emulated": jax.default_backend() == "cpu",
    }


def write(
    directory: pathlib.Path, title: str, notes: list[str], items: list[Table | Figure], config: Any = None
) -> pathlib.Path:
    """Write report.md and report.html into `directory`; return the page's path.

    config: JSON data, folded away at the end of the page.
    """
    (directory / "report.md").write_text(_markdown(title, notes, items))
    page = directory / "report.html"
    page.write_text(_html(directory, title, notes, items, config))
    return page


def _markdown(title: str, notes: list[str], items: list[Table | Figure]) -> str:
    lines = [f"# {title}", "", *(f"- {note}" for note in notes), ""]
    for item in items:
        if isinstance(item, Figure):
            lines += [f"![{item.caption}]({item.file})", ""]
        else:
            lines += [f"## {item.title}", ""] if item.title else []
            lines += ["| " + " | ".join(item.columns) + " |", "|" + "---|" * len(item.columns)]
            lines += ["| " + " | ".join(cells) + " |" for cells in item.rows]
            lines += [""]
    return "\n".join(lines)


def _html(directory: pathlib.Path, title: str, notes: list[str], items: list[Table | Figure], config: Any) -> str:
    body = [f"<h1>{html.escape(title)}</h1>", "<ul>", *(f"<li>{html.escape(note)}</li>" for note in notes), "</ul>"]
    for item in items:
        if isinstance(item, Figure):
            data = base64.b64encode((directory / item.file).read_bytes()).decode()
            caption = html.escape(item.caption)
            image = f'<img alt="{caption}" src="data:image/png;base64,{data}">'
            body.append(f"<figure>{image}<figcaption>{caption}</figcaption></figure>")
        else:
            body += [f"<h2>{html.escape(item.title)}</h2>"] if item.title else []
            body += ["<table><thead>", _row("th", item.columns), "</thead><tbody>"]
            body += [*(_row("td", cells) for cells in item.rows), "</tbody></table>"]
    if config is not None:
        text = html.escape(json.dumps(config, indent=1))
        body.append(f"<details><summary>Configuration</summary><pre>{text}</pre></details>")
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"


def _row(tag: str, cells: tuple[str, ...]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
