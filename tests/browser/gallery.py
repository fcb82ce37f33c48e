"""Screenshots of pages with an index, for people to look at: `build/screenshots/index.html`."""

from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from playwright.async_api import Page

Theme: TypeAlias = Literal["light", "dark"]
THEMES: tuple[Theme, ...] = get_args(Theme)
WIDTHS = {320: 720, 768: 1024, 1440: 900}
"""The widths of the pictures, with the heights of such screens."""

FOLDER = Path(__file__).parents[2] / "build" / "screenshots"


@dataclass
class Gallery:
    """Writes screenshots, and finally the page that shows them."""

    folder: Path = FOLDER
    pictures: dict[str, list[str]] = field(default_factory=dict)

    async def take(self, page: Page, name: str, theme: Theme, width: int) -> None:
        """Show the page at this width in this theme, and take its picture."""
        await show(page, theme, width)
        self.folder.mkdir(parents=True, exist_ok=True)
        file = f"{name}-{width}-{theme}.png"
        await page.screenshot(path=self.folder / file, full_page=True)
        self.pictures.setdefault(name, []).append(file)

    def write_index(self) -> None:
        """Write the page with all pictures of this folder."""
        rows = "".join(map(_row, self.pictures, self.pictures.values()))
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "index.html").write_text(
            "<!doctype html><html lang=en><meta charset=utf-8><title>Screenshots</title>"
            "<style>body{font:14px system-ui;margin:24px}img{border:1px solid #ccc;height:320px;"
            "object-fit:cover;object-position:top;margin:4px}</style>"
            f"<h1>Screenshots</h1>{rows}</html>\n"
        )


async def show(page: Page, theme: Theme, width: int) -> None:
    """Show the page at this width in this theme, without loading it again."""
    await page.emulate_media(color_scheme=theme, reduced_motion="reduce")
    await page.set_viewport_size({"width": width, "height": WIDTHS[width]})


def _row(name: str, files: list[str]) -> str:
    pictures = "".join(
        f'<a href="{escape(file)}"><img src="{escape(file)}" alt="{escape(file)}"></a>'
        for file in files
    )
    return f"<h2>{escape(name)}</h2><p>{pictures}</p>"
