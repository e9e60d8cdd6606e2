//! Pictures and clips drawn from random numbers: a banded gradient with a few shapes, small once encoded.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;

/// How an image is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Jpeg,
    Png,
    WebP,
}

impl Format {
    pub(super) const fn extension(self) -> &'static str {
        match self {
            Self::Jpeg => "jpg",
            Self::Png => "png",
            Self::WebP => "webp",
        }
    }
}

/// Bands of a gradient: enough to be a picture, few enough to pack well without loss.
const BANDS: usize = 10;
/// Shapes on it.
const SHAPES: usize = 6;
const NUM_COLOURS: usize = BANDS + SHAPES;

/// A filled ellipse or rectangle; lengths are parts of the picture's sides.
#[derive(Debug, Clone, Copy)]
struct Shape {
    is_round: bool,
    centre: [f32; 2],
    half: [f32; 2],
    /// How far it moves from frame to frame.
    speed: [f32; 2],
}

struct Scene {
    /// Direction of the gradient.
    direction: [f32; 2],
    palette: [[u8; 3]; NUM_COLOURS],
    shapes: [Shape; SHAPES],
}

impl Scene {
    fn new(random: &mut ChaCha8Rng) -> Self {
        let mut colour = || -> [f32; 3] { std::array::from_fn(|_| random.random_range(0.0..256.0)) };
        let (start, end) = (colour(), colour());
        let palette = std::array::from_fn(|index| {
            if index >= BANDS {
                return colour().map(|c| c as u8);
            }
            let part = index as f32 / (BANDS - 1) as f32;
            std::array::from_fn(|channel| (start[channel] + part * (end[channel] - start[channel])) as u8)
        });
        let angle: f32 = random.random_range(0.0..std::f32::consts::FRAC_PI_2);
        let shapes = std::array::from_fn(|_| Shape {
            is_round: random.random(),
            centre: std::array::from_fn(|_| random.random_range(0.0..1.0)),
            half: std::array::from_fn(|_| random.random_range(0.04..0.25)),
            speed: std::array::from_fn(|_| random.random_range(-0.06..0.06)),
        });
        Self { direction: [angle.cos(), angle.sin()], palette, shapes }
    }

    /// Position in the palette of each pixel of a frame, row by row.
    fn indices(&self, (width, height): (u32, u32), frame: u32) -> Vec<u8> {
        let [across, down] = self.direction;
        let mut pixels = Vec::with_capacity((width * height) as usize);
        for y in 0..height {
            let v = y as f32 / height as f32;
            for x in 0..width {
                let u = x as f32 / width as f32;
                let part = (u * across + v * down) / (across + down);
                pixels.push(((part * BANDS as f32) as u8).min(BANDS as u8 - 1));
            }
        }
        for (number, shape) in self.shapes.iter().enumerate() {
            let centre: [f32; 2] = std::array::from_fn(|axis| {
                (shape.centre[axis] + shape.speed[axis] * frame as f32).rem_euclid(1.0)
            });
            let range = |axis: usize, side: u32| {
                let edge = |place: f32| ((place * side as f32) as u32).min(side);
                edge((centre[axis] - shape.half[axis]).max(0.0))..edge(centre[axis] + shape.half[axis])
            };
            for y in range(1, height) {
                let v = (y as f32 / height as f32 - centre[1]) / shape.half[1];
                for x in range(0, width) {
                    let u = (x as f32 / width as f32 - centre[0]) / shape.half[0];
                    if !shape.is_round || u * u + v * v <= 1.0 {
                        pixels[(y * width + x) as usize] = (BANDS + number) as u8;
                    }
                }
            }
        }
        pixels
    }
}

/// The bytes of an image of `size` = (width, height) pixels.
pub(super) fn image(random: &mut ChaCha8Rng, size: (u32, u32), format: Format) -> Vec<u8> {
    let scene = Scene::new(random);
    let indices = scene.indices(size, 0);
    let mut pixels = Vec::with_capacity(3 * indices.len());
    // Not by an iterator over all bytes, which asks three times a pixel whether it has ended.
    for index in indices {
        pixels.extend_from_slice(&scene.palette[usize::from(index)]);
    }
    match format {
        Format::Jpeg => jpeg(&pixels, size),
        Format::Png => png(&pixels, size),
        Format::WebP => webp(&pixels, size),
    }
}

/// Why encoding cannot fail: memory takes all bytes, and no side of `tables` is beyond a format's limit.
const FITS: &str = "memory takes every image of the tables' sizes";

fn jpeg(rgb: &[u8], (width, height): (u32, u32)) -> Vec<u8> {
    let mut bytes = Vec::new();
    jpeg_encoder::Encoder::new(&mut bytes, 80)
        .encode(rgb, width as u16, height as u16, jpeg_encoder::ColorType::Rgb)
        .expect(FITS);
    bytes
}

fn png(rgb: &[u8], (width, height): (u32, u32)) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_compression(png::Compression::Balanced);
    encoder.set_filter(png::Filter::Sub);
    encoder.write_header().and_then(|mut image| image.write_image_data(rgb)).expect(FITS);
    bytes
}

fn webp(rgb: &[u8], (width, height): (u32, u32)) -> Vec<u8> {
    let mut bytes = Vec::new();
    image_webp::WebPEncoder::new(&mut bytes)
        .encode(rgb, width, height, image_webp::ColorType::Rgb8)
        .expect(FITS);
    bytes
}

/// The bytes of an animated GIF with `num_frames` frames of `size` = (width, height) pixels, `frame_ms` apart.
pub(super) fn clip(random: &mut ChaCha8Rng, size: (u32, u32), num_frames: u32, frame_ms: u32) -> Vec<u8> {
    let scene = Scene::new(random);
    let (width, height) = (size.0 as u16, size.1 as u16);
    let mut bytes = Vec::new();
    let mut encoder = gif::Encoder::new(&mut bytes, width, height, scene.palette.as_flattened())
        .expect("memory takes a palette of 16 colours");
    for number in 0..num_frames {
        let frame = gif::Frame {
            width,
            height,
            buffer: scene.indices(size, number).into(),
            // A GIF counts hundredths of a second.
            delay: (frame_ms / 10) as u16,
            ..gif::Frame::default()
        };
        encoder.write_frame(&frame).expect("memory takes a frame of the clip's size");
    }
    drop(encoder);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::stream;
    use std::io::Cursor;

    /// Width, height and the RGB bytes, as a decoder of another hand than the encoder's reads them where there is one.
    fn decoded(bytes: &[u8], format: Format) -> (usize, usize, Vec<u8>) {
        match format {
            Format::Jpeg => {
                let mut decoder = zune_jpeg::JpegDecoder::new(Cursor::new(bytes));
                let rgb = decoder.decode().unwrap();
                let (width, height) = decoder.dimensions().unwrap();
                (width, height, rgb)
            }
            Format::Png => {
                let mut reader = png::Decoder::new(Cursor::new(bytes)).read_info().unwrap();
                let mut rgb = vec![0; reader.output_buffer_size().unwrap()];
                let info = reader.next_frame(&mut rgb).unwrap();
                (info.width as usize, info.height as usize, rgb)
            }
            Format::WebP => {
                let mut decoder = image_webp::WebPDecoder::new(Cursor::new(bytes)).unwrap();
                let mut rgb = vec![0; decoder.output_buffer_size().unwrap()];
                decoder.read_image(&mut rgb).unwrap();
                let (width, height) = decoder.dimensions();
                (width as usize, height as usize, rgb)
            }
        }
    }

    #[test]
    fn pictures_decode_to_what_was_drawn() {
        for (number, format) in [Format::Jpeg, Format::Png, Format::WebP].into_iter().enumerate() {
            let bytes = image(&mut stream(0, number as u64), (161, 90), format);
            let (width, height, rgb) = decoded(&bytes, format);
            assert_eq!((width, height, rgb.len()), (161, 90, 161 * 90 * 3), "{format:?}");
            let scene = Scene::new(&mut stream(0, number as u64));
            let drawn =
                scene.indices((161, 90), 0).into_iter().flat_map(|index| scene.palette[usize::from(index)]);
            // JPEG loses at edges; the others lose nothing.
            let error: u64 = drawn.zip(&rgb).map(|(drawn, &read)| u64::from(drawn.abs_diff(read))).sum();
            let limit = if format == Format::Jpeg { 8 * rgb.len() as u64 } else { 0 };
            assert!(error <= limit, "{format:?}: {error} over {} bytes", rgb.len());
        }
    }

    #[test]
    fn clips_decode_frame_by_frame_and_move() {
        let bytes = clip(&mut stream(0, 9), (64, 48), 5, 8000);
        let mut decoder = gif::DecodeOptions::new().read_info(bytes.as_slice()).unwrap();
        let mut frames = Vec::new();
        while let Some(frame) = decoder.read_next_frame().unwrap() {
            assert_eq!((frame.width, frame.height, frame.delay), (64, 48, 800));
            frames.push(frame.buffer.to_vec());
        }
        assert_eq!(frames.len(), 5);
        assert!(frames.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
