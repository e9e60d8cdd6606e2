//! Headers of real files against what Pillow and `PyAV` say of them, and of broken ones against no panic.

#![allow(clippy::unwrap_used)]

use dflop_data::DataError;
use dflop_data::probe::{MediaKind, Probe, probe, probe_bytes};
use proptest::prelude::*;
use rand::{Rng, RngExt, SeedableRng};
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/media")
}

fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(fixtures().join(name)).unwrap()
}

fn read(bytes: &[u8]) -> Result<Probe, DataError> {
    probe_bytes(Path::new("file"), bytes)
}

fn size(bytes: &[u8]) -> (u32, u32) {
    let probe = read(bytes).unwrap();
    (probe.width.unwrap(), probe.height.unwrap())
}

/// Rows of `expected.csv`, as (file name, other cells).
fn expected() -> Vec<(String, Vec<String>)> {
    let table = std::fs::read_to_string(fixtures().join("expected.csv")).unwrap();
    let rows = table.lines().skip(1).map(|line| {
        let mut cells = line.split(',').map(str::to_owned);
        (cells.next().unwrap(), cells.collect())
    });
    rows.collect()
}

/// Kind, format, sizes, counts and rates are equal; durations within half a millisecond.
#[test]
fn real_files_read_as_pillow_and_pyav_read_them() {
    let rows = expected();
    assert!(rows.len() >= 25, "{} rows", rows.len());
    for (file, cells) in rows {
        let found = probe(&fixtures().join(&file)).unwrap();
        assert_eq!((found.kind.as_str(), found.format), (cells[0].as_str(), cells[1].as_str()), "{file}");
        let whole = |cell: &str| (!cell.is_empty()).then(|| cell.parse::<u64>().unwrap());
        assert_eq!(found.width.map(u64::from), whole(&cells[2]), "{file}");
        assert_eq!(found.height.map(u64::from), whole(&cells[3]), "{file}");
        assert_eq!(found.frames, whole(&cells[4]), "{file}");
        let near = |found: Option<f64>, cell: &str, tolerance: f64| match found {
            None => cell.is_empty(),
            Some(value) => cell.parse::<f64>().is_ok_and(|expected| (value - expected).abs() < tolerance),
        };
        assert!(near(found.fps, &cells[5], 1e-3), "{file}: {:?} is not {} frames/s", found.fps, cells[5]);
        assert!(
            near(found.duration_s, &cells[6], 5e-4),
            "{file}: {:?} is not {} s",
            found.duration_s,
            cells[6]
        );
        assert_eq!(found.channels.map(u64::from), whole(&cells[7]), "{file}");
        assert_eq!(found.sample_rate.map(u64::from), whole(&cells[8]), "{file}");
        assert_eq!(found.bytes, std::fs::metadata(fixtures().join(&file)).unwrap().len(), "{file}");
    }
}

/// Cut at any length a file is answered or refused with its cause: no panic, and no I/O error from memory.
#[test]
fn files_cut_anywhere_are_answered_or_refused() {
    for (file, _) in expected() {
        let whole = fixture(&file);
        // Every length through the headers, then some hundred more.
        let step = (whole.len() / 300).max(1);
        let lengths = (0..whole.len().min(1500)).chain((1500..whole.len()).step_by(step));
        for length in lengths {
            if let Err(error) = read(&whole[..length]) {
                let is_sound = matches!(error, DataError::Media { .. } | DataError::UnknownFormat { .. });
                assert!(is_sound, "{file} cut to {length}: {error}");
            }
        }
    }
}

/// Cut at every kilobyte, each file of the fixtures and of `DFLOP_MEDIA_DIR`: answered or refused.
#[test]
fn files_cut_at_every_kilobyte_are_answered_or_refused() {
    let more = std::env::var_os("DFLOP_MEDIA_DIR").map(PathBuf::from);
    let (mut num_files, mut num_answered) = (0, 0);
    for entry in [Some(fixtures()), more].into_iter().flatten().flat_map(|d| std::fs::read_dir(d).unwrap()) {
        let path = entry.unwrap().path();
        let whole = std::fs::read(&path).unwrap();
        num_files += 1;
        for length in (0..=whole.len()).step_by(1024).chain([whole.len()]) {
            match read(&whole[..length]) {
                Ok(_) => num_answered += 1,
                Err(DataError::Media { .. } | DataError::UnknownFormat { .. }) => {}
                Err(error) => panic!("{} cut to {length}: {error}", path.display()),
            }
        }
    }
    println!("{num_files} files, {num_answered} answers");
    assert!(num_files > 30 && num_answered > num_files);
}

/// Flipped, zeroed and repeated bytes: no panic, and an answer keeps the rules of its kind.
#[test]
fn files_with_wrong_bytes_are_answered_or_refused() {
    let seed = 20_261_120;
    println!("seed {seed}");
    let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    for (file, _) in expected() {
        let whole = fixture(&file);
        for _ in 0..400 {
            let mut bytes = whole.clone();
            for _ in 0..random.random_range(1..6) {
                // Headers are where harm is done: half of the changes hit the first kilobyte, half the rest.
                let reach = if random.random() { bytes.len().min(1024) } else { bytes.len() };
                let at = random.random_range(0..reach);
                match random.random_range(0..4) {
                    0 => bytes[at] = 0,
                    1 => bytes[at] = 0xff,
                    2 => bytes[at] ^= 1 << random.random_range(0..8),
                    _ => {
                        let end = (at + 4).min(bytes.len());
                        random.fill_bytes(&mut bytes[at..end]);
                    }
                }
            }
            if let Ok(found) = read(&bytes) {
                assert_eq!(found.width.is_some(), found.kind != MediaKind::Audio, "{file}: {found:?}");
                assert!(found.width != Some(0) && found.height != Some(0), "{file}: {found:?}");
                assert!(found.duration_s.is_none_or(|s| s.is_finite() && s > 0.0), "{file}: {found:?}");
                assert!(found.fps.is_none_or(|fps| fps.is_finite() && fps > 0.0), "{file}: {found:?}");
            }
        }
    }
}

proptest! {
    /// Random bytes behind the first bytes of each format.
    #[test]
    fn noise_is_answered_or_refused(start in 0usize..STARTS.len(), noise in prop::collection::vec(any::<u8>(), 0..600)) {
        let mut bytes = STARTS[start].to_vec();
        bytes.extend(noise);
        let _ = read(&bytes);
    }
}

const STARTS: [&[u8]; 18] = [
    b"\xff\xd8\xff",
    b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR",
    b"GIF89a",
    b"RIFF\0\0\0\0WEBPVP8X",
    b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0",
    b"RIFF\0\0\0\0AVI LIST\0\x10\0\0hdrlLIST\0\x08\0\0strl",
    b"FORM\0\0\0\0AIFFCOMM",
    b"BM\0\0\0\0\0\0\0\0\0\0\0\0\x28\0",
    b"II*\0\x08\0\0\0",
    b"MM\0+\0\x08\0\0",
    b"\0\0\0\x10ftypisom\0\0\0\0\0\0\x02\0moov\0\0\x01\0trak\0\0\0\xf0mdia",
    b"\0\0\0\x10ftypavif\0\0\0\0\0\0\x01\0meta\0\0\0\0\0\0\0\x0epitm",
    b"\x1a\x45\xdf\xa3\x80\x18\x53\x80\x67\xff\x16\x54\xae\x6b\xff\xae\xff",
    b"OggS\0\x02\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x01\x1e\x01vorbis",
    b"fLaC\0\0\0\x22",
    b"ID3\x04\0\0\0\0\0\x02\0\0\xff\xfb\x90\x64",
    b"\xff\xf1\x50\x80",
    b"\xff\xfb\x90\x64",
];

/// A JPEG of 4 x 2 pixels as stored, with one application segment, up to its first scan.
fn jpeg(segment: &[u8]) -> Vec<u8> {
    let mut bytes = b"\xff\xd8\xff\xe1".to_vec();
    bytes.extend((segment.len() as u16 + 2).to_be_bytes());
    bytes.extend(segment);
    bytes.extend(b"\xff\xc0\0\x0b\x08\0\x02\0\x04\x01\x01\x11\0\xff\xda");
    bytes
}

fn exif(orientation: u8) -> Vec<u8> {
    let mut bytes = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0".to_vec();
    bytes.extend([orientation, 0, 0, 0, 0, 0, 0]);
    bytes
}

/// Orientations 5 to 8 lie on their side; anything else is as stored.
#[test]
fn exif_turns_a_picture() {
    for orientation in 0..=9 {
        let turned = (5..=8).contains(&orientation);
        let segment = [b"Exif\0\0".as_slice(), &exif(orientation)].concat();
        assert_eq!(size(&jpeg(&segment)), if turned { (2, 4) } else { (4, 2) }, "{orientation}");
    }
    // A broken directory turns nothing.
    assert_eq!(size(&jpeg(b"Exif\0\0MM\0*\0\0\xff\xff")), (4, 2));
}

/// EXIF behind any number of pixel chunks, equal or not, turns a PNG; pixels that look like chunks do not mislead.
#[test]
fn exif_behind_the_pixels_turns_a_png() {
    let chunk = |kind: &[u8], body: &[u8]| [&(body.len() as u32).to_be_bytes(), kind, body, &[0; 4]].concat();
    let head =
        [b"\x89PNG\r\n\x1a\n".as_slice(), &chunk(b"IHDR", b"\0\0\0\x04\0\0\0\x02\x08\0\0\0\0")].concat();
    for lengths in
        [vec![], vec![0; 5], vec![40; 1], vec![40; 2], vec![40; 9], vec![40; 1_000], vec![40, 41, 40, 7]]
    {
        // Each body begins as the chunk itself does.
        let pixels: Vec<u8> = lengths
            .iter()
            .flat_map(|&length: &usize| {
                let body: Vec<u8> =
                    chunk(b"IDAT", &vec![0; length]).into_iter().cycle().take(length).collect();
                chunk(b"IDAT", &body)
            })
            .collect();
        let bytes = [&head[..], &pixels, &chunk(b"eXIf", &exif(6)), &chunk(b"IEND", b"")].concat();
        assert_eq!(size(&bytes), (2, 4), "{lengths:?}");
    }
}

/// Where EXIF is silent Pillow asks XMP, as an attribute or as an element.
#[test]
fn xmp_turns_a_picture() {
    for (packet, turned) in [
        ("tiff:Orientation=\"6\"", true),
        ("<tiff:Orientation>8</tiff:Orientation>", true),
        ("tiff:Orientation=\"3\"", false),
        ("nothing", false),
    ] {
        // Long enough for the search to cross the seam of its pieces.
        let packet = format!("http://ns.adobe.com/xap/1.0/\0{}{packet}/>", " ".repeat(4_090));
        assert_eq!(size(&jpeg(packet.as_bytes())), if turned { (2, 4) } else { (4, 2) }, "{packet}");
    }
}

/// A photograph cut behind its frame header keeps its size; before it there is nothing to answer.
#[test]
fn a_truncated_jpeg_is_answered_from_its_frame_header_on() {
    let whole = fixture("pillow_flower_orientation_8.jpg");
    let frame_at = whole.windows(4).position(|w| w == [0xff, 0xc0, 0, 17]).unwrap();
    assert_eq!(size(&whole[..frame_at + 19]), (360, 480));
    let error = read(&whole[..frame_at]).unwrap_err().to_string();
    let expected = format!(
        "`file` is not a valid jpeg file: it has {frame_at} bytes and no frame header before its first scan"
    );
    assert_eq!(error, expected);
}

/// PNG allows its EXIF chunk after the pixels.
#[test]
fn exif_behind_the_pixels_of_a_png_turns_it() {
    let chunk =
        |kind: &[u8], body: &[u8]| [&(body.len() as u32).to_be_bytes()[..], kind, body, &[0; 4]].concat();
    let png = [
        b"\x89PNG\r\n\x1a\n".to_vec(),
        chunk(b"IHDR", b"\0\0\0\x04\0\0\0\x02\x10\x02\0\0\0"),
        chunk(b"IDAT", &[7; 9_000]),
        chunk(b"eXIf", &exif(6)),
        chunk(b"IEND", b""),
    ];
    assert_eq!(size(&png.concat()), (2, 4));
}

#[test]
fn a_bitmap_stored_top_down_has_a_height() {
    let mut bmp = b"BM\0\0\0\0\0\0\0\0\x36\0\0\0\x28\0\0\0\x05\0\0\0".to_vec();
    bmp.extend((-7i32).to_le_bytes());
    assert_eq!(size(&bmp), (5, 7));
}

/// A frame shown for less than 20 ms is shown for 100 ms; the others as they say: 10 + 5 hundredths.
#[test]
fn a_gif_lasts_as_long_as_its_delays() {
    let mut gif = b"GIF89a\x03\0\x02\0\0\0\0".to_vec();
    for delay in [0, 5] {
        gif.extend([0x21, 0xf9, 4, 0, delay, 0, 0, 0]);
        gif.extend(b"\x2c\0\0\0\0\x03\0\x02\0\0\x02\x01\x44\0");
    }
    gif.push(0x3b);
    let found = read(&gif).unwrap();
    assert_eq!((found.kind, found.frames, found.duration_s), (MediaKind::Video, Some(2), Some(0.15)));
}

/// A stream's header cannot know its length: the largest size, or 0 in RF64 with the truth in `ds64`.
#[test]
fn a_streamed_wave_file_lasts_as_long_as_the_file() {
    let mut wav =
        b"RIFF\xff\xff\xff\xffWAVEfmt \x10\0\0\0\x01\0\x02\0\x40\x1f\0\0\0\x7d\0\0\x04\0\x10\0data".to_vec();
    wav.extend(u32::MAX.to_le_bytes());
    wav.extend([0; 4 * 2000]);
    let found = read(&wav).unwrap();
    assert_eq!((found.channels, found.sample_rate, found.duration_s), (Some(2), Some(8000), Some(0.25)));
}

/// Without the total in STREAMINFO the last frame's number tells it.
#[test]
fn a_flac_stream_of_unknown_length_is_read_from_its_end() {
    let mut flac = fixture("music_metadata_flac_libFLAC.flac");
    let stated = read(&flac).unwrap().duration_s.unwrap();
    // 36 bits of samples end at byte 25.
    flac[21] &= 0xf0;
    flac[22..26].fill(0);
    let found = read(&flac).unwrap().duration_s.unwrap();
    assert!((found - stated).abs() < 1e-9, "{found} s, stated {stated} s");
}

/// Counts of four thousand million in a file of a few hundred bytes are refused at once.
#[test]
fn counts_that_no_file_could_hold_are_refused() {
    let mp4 = fixture("go_mp4_sample.mp4");
    let at = mp4.windows(4).position(|w| w == b"stts").unwrap();
    let mut broken = mp4.clone();
    broken[at + 8..at + 12].fill(0xff);
    let error = read(&broken).unwrap_err().to_string();
    assert_eq!(error, "`file` is not a valid mp4 file: box `stts` is too small for its 4294967295 entries");
}

/// Of frames that last for weeks the rate rounds to nothing: it is then that of the whole. Centuries are refused.
#[test]
fn a_matroska_file_with_frames_of_weeks_has_a_rate() {
    let tracks = b"\x1a\x45\xdf\xa3\x80\x16\x54\xae\x6b\x80\xae\x80\xd7\x81\x01\x83\x81\x01\xe0\x80\xb0\x81\x40\xba\x81\x30";
    let blocks = b"\x1f\x43\xb6\x75\x80\xe7\x81\x00\xa3\x84\x81\x00\x00\x00\xa3\x84\x81\x00\x28\x00";
    let file = |frame_ns: u64| {
        let frame = [&b"\x23\xe3\x83\x88"[..], &frame_ns.to_be_bytes()].concat();
        read(&[&tracks[..], &frame, blocks].concat())
    };
    let short = file(40_000_000).unwrap();
    assert_eq!((short.frames, short.fps), (Some(2), Some(25.0)));
    let fps = file(4_000_000_000_000_000).unwrap().fps.unwrap();
    assert!(fps > 0.0 && fps < 1e-6, "{fps}");
    let error = file(u64::MAX).unwrap_err().to_string();
    assert!(error.contains("must be at most 1e7"), "{error}");
}

/// The first part of a stream in fragments has sizes, and does not know its frames.
#[test]
fn an_initialisation_segment_has_no_frames() {
    let whole = fixture("go_mp4_sample_fragmented.mp4");
    let first_fragment = whole.windows(4).position(|w| w == b"moof").unwrap() - 4;
    let found = read(&whole[..first_fragment]).unwrap();
    assert_eq!((found.width, found.height), (Some(1280), Some(720)));
    assert_eq!((found.frames, found.fps, found.duration_s), (None, None, None));
}

#[test]
fn what_is_no_media_is_named_by_its_first_bytes() {
    assert_eq!(
        read(b"{\"id\": 1}").unwrap_err().to_string(),
        "`file` is of no media format dflop reads: it begins with 7b 22 69 64 22 3a 20 31"
    );
    assert_eq!(read(b"").unwrap_err().to_string(), "`file` is of no media format dflop reads: it is empty");
    let missing = probe(Path::new("no/such/file.jpg")).unwrap_err();
    assert!(matches!(&missing, DataError::Io { act: "read", .. }), "{missing}");
    assert!(matches!(probe(&fixtures()).unwrap_err(), DataError::Io { .. }));
}
