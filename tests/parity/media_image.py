"""Decoding, resizing, turning and patching of images against Pillow and transformers' PIL-backed processor."""
# slow
import io
import json
import struct
import unittest
import zlib

import numpy as np
from PIL import Image, ImageOps

from media_common import Checks, Probe, settle

rng = np.random.default_rng(7)
probe, checks = Probe(), Checks()


def picture(height, width, channels=3):
    """Smooth waves with noise: content on which filters and chroma subsampling show."""
    y, x = np.mgrid[0:height, 0:width]
    planes = [127 + 90 * np.sin(x / (3 + c) + c) * np.cos(y / (5 - c % 3)) + rng.normal(0, 12, (height, width))
              for c in range(channels)]
    return np.clip(np.stack(planes, -1), 0, 255).astype(np.uint8)


def on_white(image):
    """What the contract asks for: turned, over white, RGB; 16-bit grey by its high byte."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        return np.repeat((np.array(image).astype(np.uint32) >> 8).astype(np.uint8)[..., None], 3, -1)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGB", rgba.size, "white")
        white.paste(rgba, mask=rgba.getchannel("A"))
        return np.array(white)
    return np.array(image.convert("RGB"))


def decoded(data):
    file, out = probe.dir / "file", probe.dir / "out"
    file.write_bytes(data)
    answer = probe.ask(op="decode", file=str(file), out=str(out))
    if "error" in answer:
        return answer["error"]
    pixels = np.frombuffer(out.read_bytes(), np.uint8).reshape(answer["height"], answer["width"], 3)
    checks.check(answer["header"] == [answer["width"], answer["height"]], f"header size {answer}")
    return pixels


def compare(name, data, tolerance=0, want=None):
    got = decoded(data)
    if isinstance(got, str):
        return checks.check(False, f"{name}: {got}")
    if want is None:
        want = on_white(Image.open(io.BytesIO(data)))
    if not checks.check(got.shape == want.shape, f"{name}: {got.shape} against {want.shape}"):
        return False
    error = np.abs(got.astype(int) - want).max()
    return checks.check(error <= tolerance, f"{name}: off by {error}")


def saved(image, **options):
    buffer = io.BytesIO()
    image.save(buffer, **options)
    return buffer.getvalue()


def with_orientation(value):
    exif = Image.Exif()
    exif[0x0112] = value
    return exif.tobytes()


SIZES = [(1, 1), (3, 5), (17, 8), (64, 48), (33, 130)]


def jpeg():
    for h, w in SIZES:
        for quality, sampling, progressive in [(95, 0, False), (80, 1, False), (50, 2, True), (80, 2, False)]:
            data = saved(Image.fromarray(picture(h, w)), format="JPEG", quality=quality, subsampling=sampling,
                         progressive=progressive)
            compare(f"jpeg {h}x{w} q{quality} s{sampling}", data, tolerance=2)
        compare(f"jpeg grey {h}x{w}", saved(Image.fromarray(picture(h, w)[..., 0]), format="JPEG"), tolerance=1)
        cmyk = Image.fromarray(picture(h, w, 4), mode="CMYK")
        compare(f"jpeg cmyk {h}x{w}", saved(cmyk, format="JPEG", quality=90), tolerance=2)
        compare(f"jpeg ycck {h}x{w}", as_ycck(saved(cmyk, format="JPEG", quality=90)), tolerance=3)
    for orientation in range(1, 9):
        data = saved(Image.fromarray(picture(24, 40)), format="JPEG", exif=with_orientation(orientation))
        compare(f"jpeg orientation {orientation}", data, tolerance=2)
    whole = saved(Image.fromarray(picture(24, 40)), format="JPEG")
    compare("jpeg without an end marker", whole[:-2], tolerance=2, want=on_white(Image.open(io.BytesIO(whole))))


def as_ycck(data):
    """The same bytes read as YCCK: Adobe's transform flag set to 2."""
    at = data.index(b"Adobe")
    return data[:at + 11] + b"\2" + data[at + 12:]


def png_file(width, height, depth, color, rows, extra=b"", interlace=0):
    """A PNG from packed rows, for the kinds that Pillow does not write."""
    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlace)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra
            + chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows))) + chunk(b"IEND", b""))


def chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def packed(values, depth):
    """Rows of `depth`-bit samples."""
    bits = ((values[..., None] >> np.arange(depth)[::-1]) & 1).reshape(values.shape[0], -1).astype(np.uint8)
    return [np.packbits(row).tobytes() for row in bits]


def png():
    for h, w in SIZES:
        rgb, rgba = Image.fromarray(picture(h, w)), Image.fromarray(picture(h, w, 4), mode="RGBA")
        palette = rgb.quantize(17)
        for name, image in [("RGB", rgb), ("RGBA", rgba), ("L", rgb.convert("L")), ("LA", rgba.convert("LA")),
                            ("1", rgb.convert("1")), ("P", palette)]:
            compare(f"png {name} {h}x{w}", saved(image, format="PNG"))
        compare(f"png P+tRNS {h}x{w}", saved(palette, format="PNG", transparency=bytes(range(0, 255, 15))))
        compare(f"png P+one tRNS {h}x{w}", saved(palette, format="PNG", transparency=2))
        grey16 = (picture(h, w)[..., 0].astype(np.uint16) << 8) + rng.integers(0, 256, (h, w)).astype(np.uint16)
        compare(f"png I;16 {h}x{w}", saved(Image.fromarray(grey16), format="PNG"))
        deep = rng.integers(0, 65536, (h, w, 4)).astype(">u2")
        for color, channels in [(2, 3), (6, 4), (4, 2)]:
            rows = [row[:, :channels].tobytes() for row in deep]
            compare(f"png 16-bit color {color} {h}x{w}", png_file(w, h, 16, color, rows))
        for depth in (1, 2, 4, 8):
            values = rng.integers(0, 2 ** depth, (h, w))
            compare(f"png grey {depth}-bit {h}x{w}", png_file(w, h, depth, 0, packed(values, depth)))
            # The format's rule, which Pillow breaks below 8 bits: tRNS names a sample as stored.
            key = int(values[0, 0])
            want = np.where(values == key, 255, values * 255 // (2 ** depth - 1)).astype(np.uint8)
            compare(f"png grey {depth}-bit tRNS {h}x{w}",
                    png_file(w, h, depth, 0, packed(values, depth), chunk(b"tRNS", struct.pack(">H", key))),
                    want=np.repeat(want[..., None], 3, -1))
            colors = rng.integers(0, 256, (2 ** depth, 3)).astype(np.uint8).tobytes()
            compare(f"png palette {depth}-bit {h}x{w}",
                    png_file(w, h, depth, 3, packed(values, depth), chunk(b"PLTE", colors)))
        key = deep[0, 0, :3]
        opaque = np.where((deep[..., :3] == key).all(-1)[..., None], 255, deep[..., :3] >> 8).astype(np.uint8)
        compare(f"png 16-bit RGB tRNS {h}x{w}",
                png_file(w, h, 16, 2, [r[:, :3].tobytes() for r in deep], chunk(b"tRNS", key.tobytes())), want=opaque)
    pixels = picture(24, 40)
    for orientation in range(1, 9):
        compare(f"png orientation {orientation}",
                saved(Image.fromarray(pixels), format="PNG", exif=with_orientation(orientation)))
    late = saved(Image.fromarray(pixels), format="PNG")
    late = late[:-12] + chunk(b"eXIf", with_orientation(6)[6:]) + late[-12:]
    compare("png eXIf after the pixels", late)
    compare("png palette index past its end", png_file(2, 1, 8, 3, [bytes([0, 200])], chunk(b"PLTE", b"\x11\x22\x33")))


def webp():
    for h, w in SIZES:
        rgb, rgba = Image.fromarray(picture(h, w)), Image.fromarray(picture(h, w, 4), mode="RGBA")
        compare(f"webp lossless {h}x{w}", saved(rgb, format="WEBP", lossless=True))
        compare(f"webp lossless alpha {h}x{w}", saved(rgba, format="WEBP", lossless=True, exact=True))
        compare(f"webp lossy {h}x{w}", saved(rgb, format="WEBP", quality=70), tolerance=2)
        compare(f"webp lossy alpha {h}x{w}", saved(rgba, format="WEBP", quality=70), tolerance=3)
    for orientation in range(1, 9):
        compare(f"webp orientation {orientation}", saved(Image.fromarray(picture(24, 40)), format="WEBP", lossless=True,
                                                         exif=with_orientation(orientation)))
    frames = [Image.fromarray(picture(20, 30, 4), mode="RGBA") for _ in range(3)]
    compare("webp animation", saved(frames[0], format="WEBP", save_all=True, append_images=frames[1:], lossless=True,
                                    exact=True))


def gif_file(width, height, frame, palette, data_image, flags=b"", local=False, interlace=False):
    """A GIF whose frame (left, top, width, height) need not fill the screen; the pixels' coding is taken from Pillow's."""
    coded = data_image[data_image.index(b"\x2c"):]
    table = palette.ljust(768, b"\0")
    out = b"GIF89a" + struct.pack("<HHBBB", width, height, 0 if local else 0xF7, 0, 0) + (b"" if local else table) + flags
    out += b"\x2c" + struct.pack("<HHHHB", *frame, (0x87 if local else 0) | (0x40 if interlace else 0))
    return out + (table if local else b"") + coded[10:] + b"\x3b"


def gif():
    for h, w in SIZES:
        rgb = Image.fromarray(picture(h, w))
        compare(f"gif {h}x{w}", saved(rgb.quantize(40), format="GIF"))
        compare(f"gif interlaced {h}x{w}", saved(rgb.quantize(200), format="GIF", interlace=1))
        compare(f"gif grey {h}x{w}", saved(rgb.convert("L"), format="GIF"))
        compare(f"gif transparent {h}x{w}", saved(rgb.quantize(16), format="GIF", transparency=3))
    frames = [Image.fromarray(picture(20, 30)).quantize(30) for _ in range(3)]
    compare("gif animation", saved(frames[0], format="GIF", save_all=True, append_images=frames[1:]))
    inner = Image.fromarray(rng.integers(0, 256, (9, 11)).astype(np.uint8), mode="P")
    palette = rng.integers(0, 256, 768).astype(np.uint8).tobytes()
    inner.putpalette(palette)
    coded = saved(inner, format="GIF", interlace=0, optimize=False)
    coded = coded[13 + 768:]
    control = b"\x21\xf9\x04\x01\0\0\x05\0"
    for local in (False, True):
        for flags in (b"", control):
            for frame in [(3, 4, 11, 9), (0, 0, 11, 9), (12, 12, 11, 9)]:
                data = gif_file(20, 18, frame, palette, coded, flags, local)
                compare(f"gif frame {frame} local {local} transparent {bool(flags)}", data)


def damaged():
    """Cut and damaged files are refused or give a picture, never anything else; each cut well before the end is refused."""
    image = Image.fromarray(picture(40, 50))
    rgba = Image.fromarray(picture(40, 50, 4), mode="RGBA")
    files = {"JPEG": saved(image, format="JPEG"), "JPEG progressive": saved(image, format="JPEG", progressive=True),
             "PNG": saved(rgba, format="PNG"), "WebP": saved(rgba, format="WEBP"),
             "WebP lossless": saved(image, format="WEBP", lossless=True), "GIF": saved(image.quantize(64), format="GIF")}
    for name, data in files.items():
        for cut in sorted({0, 1, 3, 8, 12, 20, 40, *(len(data) * k // 23 for k in range(23))}):
            answer = decoded(data[:cut])
            checks.check(isinstance(answer, str) and ("truncated or corrupt" in answer or "empty" in answer
                                                     or "not a JPEG" in answer), f"{name} cut at {cut}: {answer}")
        for _ in range(60):
            broken = bytearray(data)
            for at in rng.integers(0, len(data), 3):
                broken[at] = rng.integers(0, 256)
            decoded(bytes(broken))
    checks.check("BMP" in decoded(saved(image, format="BMP")), "a BMP is named")
    huge = png_file(100000, 100000, 8, 0, [b"\0"])
    checks.check("over the limit of 67108864 pixels" in decoded(huge), "a header of 10^10 pixels")


def resize():
    for h, w in [(1, 1), (5, 9), (64, 64), (37, 101), (200, 3)]:
        pixels = rng.integers(0, 256, (h, w, 3)).astype(np.uint8) if h % 2 else picture(h, w)
        file, out = probe.dir / "raw", probe.dir / "out"
        file.write_bytes(pixels.tobytes())
        for to in [(1, 1), (w, h), (w, 50), (50, h), (28, 28), (w * 2 + 1, h * 3), (max(1, w // 3), max(1, h // 2)), (333, 7)]:
            for resample in (1, 2, 3):
                answer = probe.ask(op="resize", file=str(file), out=str(out), width=w, height=h, to=to, resample=resample)
                got = np.frombuffer(out.read_bytes(), np.uint8).reshape(answer["height"], answer["width"], 3)
                want = np.array(Image.fromarray(pixels).resize(to, resample=resample))
                checks.check(np.array_equal(got, want), f"resize {w}x{h} to {to} by {resample}")


def turns():
    pixels = picture(5, 8)
    file, out = probe.dir / "raw", probe.dir / "out"
    file.write_bytes(pixels.tobytes())
    for index in range(8):
        answer = probe.ask(op="dihedral", file=str(file), out=str(out), width=8, height=5, index=index)
        want = np.rot90(pixels.transpose(1, 0, 2) if index & 4 else pixels, index & 3)
        got = np.frombuffer(out.read_bytes(), np.uint8).reshape(answer["height"], answer["width"], 3)
        checks.check(np.array_equal(got, want), f"symmetry {index}")
    probe.ask(op="png", file=str(file), out=str(out), width=8, height=5)
    checks.check(np.array_equal(np.array(Image.open(out)), pixels), "encode_png")


def processor():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    settings = [dict(), dict(min_pixels=16 * 16, max_pixels=64 * 64, patch_size=4, merge_size=2),
                dict(size={"shortest_edge": 28 * 28, "longest_edge": 200 * 200}, patch_size=8, temporal_patch_size=1,
                     merge_size=1, image_mean=[0.5, 0.5, 0.5], image_std=[0.5, 0.25, 0.5]),
                dict(min_pixels=784, max_pixels=784 * 16, do_normalize=False),
                dict(min_pixels=784, max_pixels=784 * 16, do_rescale=False, resample=2),
                dict(min_pixels=784, max_pixels=784 * 16, do_rescale=False, do_normalize=False, resample=1),
                dict(do_resize=False)]
    sizes = [(28, 28), (1, 1), (1, 150), (14, 42), (42, 70), (98, 14), (101, 333), (640, 480), (56, 28), (70, 70)]
    for number, setting in enumerate(settings):
        theirs = Qwen2VLImageProcessorPil(**setting)
        written = probe.dir / f"written{number}"
        theirs.save_pretrained(written)
        plain = probe.dir / f"plain{number}"
        plain.mkdir()
        (plain / "preprocessor_config.json").write_text(json.dumps(setting))
        for h, w in sizes:
            pixels = picture(h, w)
            file, out = probe.dir / "raw", probe.dir / "out"
            file.write_bytes(pixels.tobytes())
            try:
                want = theirs(Image.fromarray(pixels), return_tensors="np")
            except ValueError:
                want = None
            for folder in (plain, written):
                answer = probe.ask(op="process", dir=str(folder), file=str(file), out=str(out), width=w, height=h)
                name = f"processor {setting} on {w}x{h}"
                if want is None:
                    checks.check("does not divide" in answer.get("error", ""), f"{name}: {answer}")
                    continue
                if not checks.check(answer.get("grid") == want["image_grid_thw"][0].tolist(), f"{name}: {answer}"):
                    continue
                got = np.frombuffer(out.read_bytes(), np.float32).reshape(want["pixel_values"].shape)
                checks.check(np.array_equal(got, want["pixel_values"]),
                             f"{name}: off by {np.abs(got - want['pixel_values']).max()}")
                checks.check(answer["tokens"] == got.shape[0] // theirs.merge_size ** 2, name)
    (probe.dir / "raw").write_bytes(bytes(3 * 201))
    answer = probe.ask(op="process", dir=str(plain.with_name("plain0")), file=str(file), out=str(out), width=201, height=1)
    checks.check("200 times" in answer.get("error", ""), f"an aspect ratio of 201: {answer}")


class ImageParity(unittest.TestCase):
    def test_jpeg(self):
        jpeg()
        settle(self, checks, at_least=70)

    def test_png(self):
        png()
        settle(self, checks, at_least=200)

    def test_webp(self):
        webp()
        settle(self, checks, at_least=50)

    def test_gif(self):
        gif()
        settle(self, checks, at_least=60)

    def test_damaged_files(self):
        damaged()
        settle(self, checks, at_least=100)

    def test_resize(self):
        resize()
        settle(self, checks, at_least=100)

    def test_symmetries(self):
        turns()
        settle(self, checks, at_least=9)

    def test_processor(self):
        processor()
        settle(self, checks, at_least=300)


if __name__ == "__main__":
    unittest.main()
