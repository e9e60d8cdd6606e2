"""Which way up a picture is: `dflop probe` against Pillow, which decodes in training and in transformers."""

import io
import itertools
import json
import struct
import subprocess
import sys
import zlib

import pytest
from PIL import Image, ImageOps, PngImagePlugin, TiffImagePlugin, features

SIDES = (20, 12)


def exif(value: int, kind: int = 3, order: str = "<", count: int = 1) -> bytes:
    """A TIFF header with one entry, the orientation; `kind` 1 is bytes, 3 a short, 4 a long, 8 and 9 signed."""
    cell = {1: "B3x", 3: "H2x", 4: "I", 8: "h2x", 9: "i"}[kind]
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IH", 8, 1)
    return head + struct.pack(order + "HHI" + cell + "I", 274, kind, count, value, 0)


def exif_of_two(first: int, second: int) -> bytes:
    """A TIFF header with two entries of the orientation."""
    entries = b"".join(struct.pack("<HHIH2x", 274, 3, 1, value) for value in (first, second))
    return b"II*\0" + struct.pack("<IH", 8, 2) + entries + bytes(4)


def xmp(value: int, form: str = 'tiff:Orientation="{}"') -> bytes:
    return f"<x:xmpmeta><rdf:Description {form.format(value)}/></x:xmpmeta>".encode()


def raw_profile(value: int) -> str:
    """EXIF as ImageMagick keeps it in a text of a PNG."""
    digits = (b"Exif\0\0" + exif(value)).hex()
    lines = "\n".join(digits[at : at + 72] for at in range(0, len(digits), 72))
    return f"\nexif\n{len(digits) // 2:8}\n{lines}\n"


def picture(form: str, **options) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", SIDES, "red").save(file, form, **options)
    return file.getvalue()


def png(*texts: tuple[str, str, str], chunks: tuple[tuple[bytes, bytes], ...] = ()) -> bytes:
    """A PNG with texts (how, keyword, text) before its pixels, and raw chunks behind them."""
    info = PngImagePlugin.PngInfo()
    for how, keyword, text in texts:
        if how.startswith("iTXt"):
            info.add_itxt(keyword, text, lang="de", tkey="x", zip=how.endswith("z"))
        else:
            info.add_text(keyword, text, zip=how == "zTXt")
    whole = picture("PNG", pnginfo=info)
    made = [struct.pack(">I", len(b)) + k + b + struct.pack(">I", zlib.crc32(k + b)) for k, b in chunks]
    return whole[:-12] + b"".join(made) + whole[-12:]


def jpeg(*segments: bytes) -> bytes:
    whole = picture("JPEG")
    made = [b"\xff\xe1" + struct.pack(">H", 2 + len(segment)) + segment for segment in segments]
    return whole[:2] + b"".join(made) + whole[2:]


def webp(*chunks: tuple[bytes, bytes]) -> bytes:
    """An extended WebP with these chunks behind its pixels."""
    whole = picture("WEBP", exif=exif(1), xmp=xmp(1))
    end = whole.index(b"EXIF", 12)
    body = whole[12:end] + b"".join(k + struct.pack("<I", len(b)) + b + bytes(len(b) % 2) for k, b in chunks)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def several(value: int) -> dict[str, bytes]:
    """Pictures with more than one EXIF, sound, empty, broken or cut in the middle; and a classic directory behind another header."""
    head, one, six = b"Exif\0\0", exif(value), exif(6)
    big = b"MM\0+" + exif(value, order=">")[4:]
    found = {
        "big.png": png(chunks=((b"eXIf", big),)),
        "big.jpg": jpeg(head + big),
        "big.webp": webp((b"EXIF", big)),
    }
    pairs = {"and-6": (one, six), "6-and": (six, one), "empty-and": (b"", one), "and-empty": (one, b"")}
    pairs |= {"cut": (one[:19], one[19:]), "broken-and": (b"broken..", one), "header": (one[:4], one[4:])}
    for name, (first, second) in pairs.items():
        found[f"{name}.jpg"] = jpeg(head + first, head + second)
        found[f"{name}-apart.jpg"] = jpeg(
            head + first, b"http://ns.adobe.com/xap/1.0/\0" + xmp(8), head + second
        )
        if name not in ("header", "cut"):
            found[f"{name}.png"] = png(chunks=((b"eXIf", first), (b"eXIf", second)))
            beside = ("zTXt", "Raw profile type exif", raw_profile(8))
            found[f"{name}-profile.png"] = png(beside, chunks=((b"eXIf", first), (b"eXIf", second)))
        if name not in ("header", "broken-and"):
            found[f"{name}.webp"] = webp((b"EXIF", first), (b"EXIF", second), (b"XMP ", xmp(8)))
    found["xmps.webp"] = webp((b"XMP ", xmp(value)), (b"XMP ", xmp(6)))
    found["xmps-back.webp"] = webp((b"XMP ", xmp(6)), (b"XMP ", xmp(value)))
    return {f"several-{value}-{name}": bytes_ for name, bytes_ in found.items()}


def pictures() -> dict[str, bytes]:
    exif_head, xmp_head = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
    found: dict[str, bytes] = {}
    for value in (0, 1, 3, 5, 6, 7, 8, 9):
        packet = xmp(value)
        found |= several(value)
        for form in ("JPEG", "WEBP", "PNG", "TIFF"):
            # Pillow writes EXIF that it parsed anew into a TIFF; it takes bytes for the others.
            tags = Image.Exif()
            tags[274] = value
            found[f"exif-{value}.{form}"] = picture(form, exif=tags if form == "TIFF" else exif(value))
        for kind, order in itertools.product((1, 3, 4, 8, 9), "<>"):
            name = "le" if order == "<" else "be"
            found[f"kind{kind}-{name}-{value}.jpg"] = jpeg(exif_head + exif(value, kind, order))
        found[f"none-{value}.jpg"] = jpeg(exif_head + exif(value, count=0), xmp_head + xmp(6))
        for form in ("JPEG", "WEBP", "PNG"):
            found[f"two-entries-{value}.{form}"] = picture(form, exif=exif_of_two(value, 6))
            found[f"two-entries-back-{value}.{form}"] = picture(form, exif=exif_of_two(6, value))
        found[f"twice-{value}.jpg"] = jpeg(2 * exif_head + exif(value))
        found[f"two-packets-{value}.jpg"] = jpeg(xmp_head + xmp(6), xmp_head + packet)
        found[f"two-packets-back-{value}.jpg"] = jpeg(xmp_head + packet, xmp_head + xmp(6))
        found[f"first-name-{value}.jpg"] = jpeg(xmp_head + b"<tiff:Orientation a/>" + packet)
        # On the seam of two pieces that are read, whatever their length.
        for fill in range(2000, 2060, 3):
            found[f"seam{fill}-{value}.jpg"] = jpeg(xmp_head + b" " * fill + packet)
        element = xmp(value, "><tiff:Orientation>{}</tiff:Orientation")
        found[f"element-{value}.webp"] = picture("WEBP", xmp=element)
        for other in (1, 6):
            both = {"exif": exif(other), "xmp": packet}
            found[f"both{other}-{value}.jpg"] = picture("JPEG", **both)
            found[f"both{other}-{value}.webp"] = picture("WEBP", **both)
            chunks = ((b"eXIf", exif(other)),)
            text = ("iTXt", "XML:com.adobe.xmp", packet.decode())
            found[f"both{other}-{value}.png"] = png(text, chunks=chunks)
            profile = ("zTXt", "Raw profile type exif", raw_profile(value))
            found[f"profile-beside{other}-{value}.png"] = png(profile, chunks=chunks)
            found[f"profile-and-xmp{other}-{value}.png"] = png(
                profile, ("iTXt", "XML:com.adobe.xmp", xmp(other).decode())
            )
        found[f"prefix-{value}.png"] = png(chunks=((b"eXIf", exif_head + exif(value)),))
        for how in ("tEXt", "zTXt", "iTXt", "iTXtz"):
            found[f"xmp-{how}-{value}.png"] = png((how, "XML:com.adobe.xmp", packet.decode()))
            found[f"profile-{how}-{value}.png"] = png((how, "Raw profile type exif", raw_profile(value)))
        late = b"Raw profile type exif\0\0" + zlib.compress(raw_profile(value).encode())
        found[f"late-{value}.png"] = png(chunks=((b"zTXt", late),))
        cut = b"XML:com.adobe.xmp\0\0" + zlib.compress(packet)[:-3]
        found[f"cut-{value}.png"] = png(chunks=((b"zTXt", cut),))
        tags = TiffImagePlugin.ImageFileDirectory_v2()
        tags[700] = packet
        found[f"xmp-{value}.tif"] = picture("TIFF", tiffinfo=tags)
        tags[274] = 1
        found[f"xmp-and-1-{value}.tif"] = picture("TIFF", tiffinfo=tags)
        # The flags of VP8X announce what libwebp gives.
        for name, options in (("exif", {"exif": exif(value)}), ("xmp", {"xmp": packet})):
            whole = bytearray(picture("WEBP", **options))
            whole[20] = 0
            found[f"unannounced-{name}-{value}.webp"] = bytes(whole)
    return found


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.skipif(not features.check("webp"), reason="Pillow without WebP")
def test_pictures_lie_as_pillow_turns_them(tmp_path):
    """EXIF of every number, in segments, chunks and texts, and XMP where EXIF is silent."""
    found = pictures()
    for name, bytes_ in found.items():
        (tmp_path / name).write_bytes(bytes_)
    command = [sys.executable, "-m", "dflop", "probe", "--json", *sorted(found)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    rows = {row["path"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert len(rows) == len(found), done.stderr
    expected = {}
    for name, bytes_ in found.items():
        with Image.open(io.BytesIO(bytes_)) as image:
            expected[name] = ImageOps.exif_transpose(image).size
    assert {SIDES, SIDES[::-1]} == set(expected.values())
    assert {name: (row["width"], row["height"]) for name, row in rows.items()} == expected


def test_what_pillow_refuses_of_a_text_is_refused(tmp_path):
    """EXIF that is no hexadecimal, a packing that PNG has not, and a text that unpacks to more than 1 MiB."""
    keyword = b"Raw profile type exif\0"
    bomb = zlib.compress(b"\nexif\n 9\n" + b"0" * (1 << 21))
    cases = {
        "digits.png": ((b"tEXt", keyword + b"\nexif\n  3\n45786z\n"), "is not hexadecimal"),
        "packing.png": ((b"zTXt", keyword + b"\1abc"), "is packed by method 1, the only one is 0"),
        "bomb.png": ((b"zTXt", keyword + b"\0" + bomb), "unpacks to more than 1048576 bytes"),
    }
    for name, (chunk, _) in cases.items():
        (tmp_path / name).write_bytes(png(chunks=(chunk,)))
        with pytest.raises((ValueError, SyntaxError)), Image.open(tmp_path / name) as image:
            ImageOps.exif_transpose(image)
    command = [sys.executable, "-m", "dflop", "probe", "--json", *cases]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    rows = {row["path"]: row for row in map(json.loads, done.stdout.splitlines())}
    for name, (_, words) in cases.items():
        assert words in rows[name]["error"]


@pytest.mark.skipif(not features.check("webp"), reason="Pillow without WebP")
def test_exif_without_a_tiff_header_is_refused_as_by_pillow(tmp_path):
    """A picture that Pillow refuses in training is a bad sample before; headers that Pillow turns around are read."""
    body, found = exif(6)[4:], {}
    heads = [b"II*\0", b"II\0*", b"MM\0*", b"MM*\0", b"II+\0", b"MM\0+", b"XX*\0", b"II\0\0", b"Exif", b""]
    for head in heads:
        swapped = exif(6, order=">")[4:] if head.startswith(b"MM") else body
        for data in (head + swapped, head + swapped[:3], head):
            name = data[:9].hex()
            found[f"{name}.jpg"] = jpeg(b"Exif\0\0" + data)
            found[f"other-{name}.jpg"] = jpeg(b"Exif\0\xff" + data)
            found[f"{name}.png"] = png(chunks=((b"eXIf", data),))
            found[f"{name}.webp"] = picture("WEBP", exif=data)
    expected, sides = {}, {}
    for name, bytes_ in found.items():
        (tmp_path / name).write_bytes(bytes_)
        try:
            with Image.open(io.BytesIO(bytes_)) as image:
                expected[name] = ImageOps.exif_transpose(image).size
        except (SyntaxError, struct.error):
            expected[name] = None
    assert {SIDES, SIDES[::-1], None} == set(expected.values())
    command = [sys.executable, "-m", "dflop", "probe", "--json", *sorted(found)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    for row in map(json.loads, done.stdout.splitlines()):
        sides[row["path"]] = (row["width"], row["height"]) if row.get("width") else None
    assert sides == expected, done.stderr


@pytest.mark.skipif(not features.check("avif"), reason="Pillow without AVIF")
def test_avif_lies_as_pillow_turns_it(tmp_path):
    """By its properties, and where they do not turn it and its EXIF says nothing, by its XMP."""
    found = {}
    for value in (0, 1, 2, 3, 5, 6, 7, 8, 9):
        tags, other = Image.Exif(), Image.Exif()
        tags[274], other[271] = value, "maker"
        for name, exif_bytes in (("none", b""), ("said", tags.tobytes()), ("other", other.tobytes())):
            for packet in (0, 1, 6):
                options = {"xmp": xmp(packet)} if packet else {}
                whole = picture("AVIF", exif=exif_bytes, **options)
                found[f"{name}-{value}-{packet}.avif"] = whole
                if name == "said" and value in (3, 6, 8):
                    # By no quarter: what the EXIF says counts for nothing, and the XMP is not asked.
                    turned = whole.index(b"irot") + 4
                    found[f"unturned-{value}-{packet}.avif"] = whole[:turned] + b"\0" + whole[turned + 1 :]
        whole = picture("AVIF", exif=other.tobytes(), xmp=xmp(6))
        entry = other.tobytes().replace(struct.pack("<H", 271), struct.pack("<H", 274))
        assert other.tobytes()[6:] in whole
        found[f"entry-{value}.avif"] = whole.replace(other.tobytes()[6:], entry[6:])
        found[f"element-{value}.avif"] = picture(
            "AVIF", xmp=xmp(value, "><tiff:Orientation>{}</tiff:Orientation")
        )
    found["undescribed.avif"] = picture("AVIF", xmp=xmp(6)).replace(b"cdsc", b"auxl")
    for name, count in (("long", 9_000), ("longer", 2 << 20)):
        found[f"{name}.avif"] = picture("AVIF", xmp=b" " * count + xmp(6))
    # Pillow takes the prefix away twice, libavif keeps it in the item.
    found["doubled.avif"] = picture("AVIF", exif=b"Exif\0\0" + other.tobytes(), xmp=xmp(6))
    for name, bytes_ in found.items():
        (tmp_path / name).write_bytes(bytes_)
    command = [sys.executable, "-m", "dflop", "probe", "--json", *sorted(found)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    rows = {row["path"]: (row["width"], row["height"]) for row in map(json.loads, done.stdout.splitlines())}
    expected = {}
    for name, bytes_ in found.items():
        with Image.open(io.BytesIO(bytes_)) as image:
            expected[name] = ImageOps.exif_transpose(image).size
    assert {SIDES, SIDES[::-1]} == set(expected.values())
    assert rows == expected


def with_box(whole: bytes, kind: bytes, body: bytes) -> bytes:
    """An AVIF with another box in the place of one of its `meta` box."""
    at, meta = whole.index(kind) - 4, whole.index(b"meta") - 4
    size = int.from_bytes(whole[at : at + 4])
    found = struct.pack(">I", len(body) + 8) + kind + body
    whole = whole[:at] + found + whole[at + size :]
    length = int.from_bytes(whole[meta : meta + 4]) + len(found) - size
    return whole[:meta] + struct.pack(">I", length) + whole[meta + 4 :]


@pytest.mark.skipif(not features.check("avif"), reason="Pillow without AVIF")
def test_an_avif_that_lists_places_of_no_bytes_keeps_nobody_busy(tmp_path):
    """Four thousand million of them: of other items nobody asks, and of the picture's XMP they are refused."""
    # Item, data reference, number of places; offsets and lengths of 0 bytes.
    empty = b"".join(struct.pack(">HHH", item, 0, 0xFFFF) for item in range(100, 65_100))
    none = struct.pack(">IBBH", 0, 0, 0, 65_000) + empty
    ours = struct.pack(">IBBH", 0, 0, 0, 3) + b"".join(
        struct.pack(">HHH", item, 0, 0xFFFF) for item in (1, 2, 3)
    )
    whole = picture("AVIF", xmp=xmp(6))
    for name, body in (("others", none), ("its_own", ours)):
        (tmp_path / f"{name}.avif").write_bytes(with_box(whole, b"iloc", body))
    command = [sys.executable, "-m", "dflop", "probe", "--json", "its_own.avif", "others.avif"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    rows = {row["path"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert (rows["others.avif"]["width"], rows["others.avif"]["height"]) == SIDES
    assert "has 65535 places that take no bytes in `iloc`" in str(rows["its_own.avif"]) + done.stderr
