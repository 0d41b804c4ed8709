"""mkdocs' hook for the documentation's site: what its pages take from elsewhere in the repository."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
SOURCE = re.compile(r"^<!-- source:(\S+) -->$", re.MULTILINE)


def on_page_markdown(markdown, page, config, files):
    """The README is the first page, programs and the command line are shown, links out of docs/ become text."""
    here = Path(config["docs_dir"], page.file.src_uri).parent
    if "<!-- README -->" in markdown:
        markdown, here = markdown.replace("<!-- README -->", (ROOT / "README.md").read_text(encoding="utf-8")), ROOT
    parts = FENCED.split(markdown)  # every other one is code
    parts[::2] = (LINK.sub(lambda found: link(found, here, Path(config["docs_dir"]), page), p) for p in parts[::2])
    markdown = SOURCE.sub(lambda found: program(found[1]), "".join(parts))
    return markdown.replace("<!-- command line -->", commands()) if "<!-- command line -->" in markdown else markdown


def link(found, here, docs, page):
    """One to a page of the site, from this page; else its text."""
    text, path, anchor = found[1], (here / found[2]).resolve(), found[3] or ""
    if not path.exists():
        raise FileNotFoundError(f"{page.file.src_uri} links to {found[2]}, which there is not")
    if docs not in path.parents:
        return f"`{path.relative_to(ROOT)}`" if text == path.name or "/" in text else text
    back = "../" * page.file.src_uri.count("/")
    return f"[{text}]({back}{path.relative_to(docs).as_posix()}{anchor})"


def program(path):
    """A file of the repository as a block of code."""
    return f"```python\n# {path}\n{(ROOT / path).read_text(encoding='utf-8').rstrip()}\n```"


def commands():
    """Every command with its options, as typer tells them."""
    import click
    import typer

    from onepass.cli import app

    command = typer.main.get_command(app)
    parts = []

    def tell(command, name):
        context = click.Context(command, info_name=name)
        usage = " ".join(command.collect_usage_pieces(context))
        parts.append(f"## {name}\n\n{command.help or ''}\n\n```\n{name} {usage}\n```\n")
        rows = [record for each in command.get_params(context) if (record := each.get_help_record(context))]
        if rows:
            cells = ((cell(option), cell(text)) for option, text in rows)
            parts.append("| option | |\n| --- | --- |\n" + "".join(f"| `{o}` | {t} |\n" for o, t in cells))
        for sub in getattr(command, "commands", {}).values():
            tell(sub, f"{name} {sub.name}")

    tell(command, "onepass")
    return "\n".join(parts)


def cell(text):
    """In one line of a table."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|")
