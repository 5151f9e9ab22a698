"""The picture of the example request. Host only."""

import base64
import io

from PIL import Image, ImageDraw


def picture_uri() -> str:
    """Draw a red disc and a blue square, 112 by 112, as a data URI of some 300 characters."""
    picture = Image.new("P", (112, 112), 0)
    picture.putpalette([255, 255, 255, 220, 30, 30, 30, 60, 220])
    draw = ImageDraw.Draw(picture)
    draw.ellipse((8, 32, 56, 80), fill=1)
    draw.rectangle((64, 32, 104, 80), fill=2)
    data = io.BytesIO()
    picture.save(data, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
