//! Remote stores against a server on the loopback: what is fetched, what is said where it fails.

#![allow(clippy::unwrap_used, reason = "a test may give up, its helpers too")]

use crate::loopback::{Manner, Server, VAST_BYTES};
use bytes::Bytes;
use dflop_data::dataset::Dataset;
use dflop_data::demo;
use dflop_data::location::{Location, MediaPlace};
use dflop_data::probe::{Probe, probe_bytes};
use dflop_data::profile::{ProfileSettings, profile, profile_into};
use dflop_data::store::{Stores, options_among};
use dflop_types::{DataProfile, SampleIndex};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::net::TcpListener;
use std::path::{Path, PathBuf};

const KIB: u64 = 1024;

fn stores() -> Stores {
    Stores::new([("allow_http".to_owned(), "true".to_owned())])
}

fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/media").join(name)).unwrap()
}

fn whole(url: &str) -> MediaPlace {
    MediaPlace::Whole(Location::parse(url))
}

/// The header as it is read from memory.
fn expected(bytes: &[u8]) -> Probe {
    probe_bytes(Path::new("oracle"), bytes).unwrap()
}

/// The movie with a megabyte before its table of contents.
fn contents_last(movie: &[u8]) -> Vec<u8> {
    let (mut first, mut last) = (Vec::new(), Vec::new());
    let mut rest = movie;
    while rest.len() >= 8 {
        let len = u32::from_be_bytes(rest[..4].try_into().unwrap()) as usize;
        if &rest[4..8] == b"moov" { &mut last } else { &mut first }.extend_from_slice(&rest[..len]);
        rest = &rest[len..];
    }
    let free = 1_u32 << 20;
    first.extend(free.to_be_bytes());
    first.extend(b"free");
    first.resize(first.len() + free as usize - 8, 0);
    assert!(!last.is_empty());
    first.extend(last);
    first
}

#[test]
fn a_header_costs_one_request_and_a_block() {
    let server = Server::start();
    for name in ["pillow_flower_orientation_8.jpg", "pillow_i_trns.png", "pillow_hopper.webp"] {
        let mut bytes = fixture(name);
        // Whatever follows the picture is not asked for.
        bytes.resize(5 << 20, 0);
        let url = server.put(name, bytes.clone(), Manner::Sound);
        let stores = stores();
        let (probe, version) = stores.probe(&whole(&url)).unwrap();
        assert_eq!(probe, expected(&bytes), "{name}");
        assert_eq!(version, "\"7\"");
        assert_eq!(server.log(), [format!("GET /{name} 0-65535")]);
        assert_eq!((stores.traffic(), server.sent()), ((1, 64 * KIB), 64 * KIB));
    }
}

#[test]
fn contents_at_the_end_of_a_movie_cost_one_request_more() {
    let server = Server::start();
    let bytes = contents_last(&fixture("go_mp4_sample.mp4"));
    let url = server.put("late.mp4", bytes.clone(), Manner::Sound);
    let stores = stores();
    let (probe, _) = stores.probe(&whole(&url)).unwrap();
    assert_eq!(probe, expected(&bytes));
    assert_eq!((probe.width, probe.frames), (Some(320), Some(10)));
    let start = bytes.len() - 64 * 1024;
    assert_eq!(
        server.log(),
        ["GET /late.mp4 0-65535".to_owned(), format!("GET /late.mp4 {start}-{}", bytes.len() - 1)]
    );
    assert_eq!(stores.traffic(), (2, 128 * KIB));
}

#[test]
fn a_long_file_is_read_in_growing_pieces_and_any_offset_is_right() {
    let server = Server::start();
    let bytes: Vec<u8> = (0..3_000_017_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let url = Location::Remote(server.put("long.jsonl", bytes.clone(), Manner::Sound));
    let stores = stores();
    let mut read = Vec::new();
    stores.open(&url).unwrap().reader.read_to_end(&mut read).unwrap();
    assert!(read == bytes);
    let (requests, fetched) = stores.traffic();
    assert!(requests <= 8, "{requests} requests");
    assert_eq!(fetched, bytes.len() as u64);

    // Size and version are known now: only what is read is asked for.
    server.log();
    assert_eq!(stores.about(&url).unwrap(), (3_000_017, "\"7\"".to_owned()));
    let mut file = stores.open(&url).unwrap();
    assert_eq!((file.len, server.log().len()), (3_000_017, 0));
    for at in [2_000_000_u64, 1_999_990, 3_000_000, 0, 65_530, 70_000, 2_999_999, 1_000_000, 1_100_000, 5] {
        let mut found = [0; 16];
        file.reader.seek(SeekFrom::Start(at)).unwrap();
        file.reader.read_exact(&mut found).unwrap();
        assert_eq!(found, bytes[at as usize..][..16], "{at}");
    }
    assert_eq!(file.reader.seek(SeekFrom::End(-3)).unwrap(), 3_000_014);
    let mut tail = Vec::new();
    file.reader.read_to_end(&mut tail).unwrap();
    assert_eq!(tail, bytes[3_000_014..]);
    assert!(file.reader.seek(SeekFrom::Current(i64::MIN)).is_err());
    file.reader.seek(SeekFrom::Start(u64::MAX)).unwrap();
    assert_eq!(file.reader.read(&mut [0; 4]).unwrap(), 0);
}

#[test]
fn a_part_of_a_file_is_a_medium() {
    let server = Server::start();
    let picture = fixture("pillow_i_trns.png");
    let mut shard = vec![1; 300_000];
    shard.extend(&picture);
    shard.resize(600_000, 2);
    let file = Location::Remote(server.put("shard.tar", shard.clone(), Manner::Sound));
    let place = |start, len| MediaPlace::Range { file: file.clone(), start, len, name: "a.png".to_owned() };
    let stores = stores();
    let part = place(300_000, picture.len() as u64);
    assert_eq!(stores.probe(&part).unwrap().0, expected(&picture));
    assert_eq!(stores.read_media(&part).unwrap(), picture);
    let range = format!("GET /shard.tar 300000-{}", 300_000 + picture.len() - 1);
    assert_eq!(server.log(), [range.clone(), range]);
    assert_eq!(stores.read_media(&place(0, 0)).unwrap(), [0_u8; 0]);
    let whole_only = MediaPlace::Range {
        file: Location::Remote(server.put("old.tar", shard.clone(), Manner::WithoutRanges)),
        start: 300_000,
        len: picture.len() as u64,
        name: "a.png".to_owned(),
    };
    assert_eq!(stores.probe(&whole_only).unwrap().0, expected(&picture));
    assert_eq!(stores.read_media(&whole_only).unwrap(), picture);
    for bad in [place(599_999, 2), place(600_000, 1), place(u64::MAX, 1), place(u64::MAX, u64::MAX)] {
        assert!(stores.read_media(&bad).is_err(), "{bad:?}");
        assert!(stores.probe(&bad).is_err(), "{bad:?}");
    }

    // The same of a file of this machine, and of a cell of a table.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("shard.tar");
    std::fs::write(&path, shard).unwrap();
    let local = MediaPlace::Range {
        file: Location::Local(path),
        start: 300_000,
        len: picture.len() as u64,
        name: "a.png".to_owned(),
    };
    assert_eq!(stores.read_media(&local).unwrap(), picture);
    let cell = MediaPlace::Bytes { bytes: Bytes::from(picture.clone()), name: "row 3".to_owned() };
    assert_eq!(stores.read_media(&cell).unwrap(), picture);
}

#[test]
fn names_reach_the_server_as_they_are() {
    let server = Server::start();
    let bytes = fixture("pillow_i_trns.png");
    server.put("data/50% #1.png", bytes.clone(), Manner::Sound);
    let base = Location::Remote(format!("{}/data", server.url));
    let stores = stores();
    assert_eq!(stores.read_media(&MediaPlace::Whole(base.join("50% #1.png"))).unwrap(), bytes);
    stores.read_media(&whole(&format!("{}/data/50%25%20%231.png?key=a/b&c=%2F", server.url))).unwrap();
    assert_eq!(server.log(), ["GET /data/50%25%20%231.png", "GET /data/50%25%20%231.png?key=a/b&c=%2F"]);
}

#[test]
fn a_failure_names_url_status_and_what_to_set() {
    let server = Server::start();
    let hasty = Stores::new(
        [("allow_http", "true"), ("read_timeout", "50ms")].map(|(k, v)| (k.to_owned(), v.to_owned())),
    );
    // A machine that does other things too may take longer to answer.
    let patient = stores();
    let big = vec![7; (8 << 20) + 1];
    // At once, for the sake of those that wait before they try again.
    let (hasty, patient, server, big) = (&hasty, &patient, &server, &big);
    let nobody = "http://127.0.0.1:1/a.png";
    std::thread::scope(|scope| {
        for (name, manner, cause) in [
            ("secret.png", Manner::Forbidden, "403 (AccessDenied): access is refused"),
            ("down.png", Manner::Down, "503, after 5 tries"),
            ("slow.png", Manner::Slow, "operation timed out, after 5 tries"),
            (
                "big.png",
                Manner::WithoutRanges,
                "the server ignores ranges and the file has 8388609 bytes; at most 8388608",
            ),
        ] {
            scope.spawn(move || {
                let stores = if matches!(manner, Manner::Slow) { hasty } else { patient };
                let url = server.put(name, big.clone(), manner);
                let error = stores.probe(&whole(&url)).unwrap_err().to_string();
                assert!(error.starts_with(&format!("cannot read `{url}`: ")), "{error}");
                assert!(error.contains(cause), "{error}");
            });
        }
        scope.spawn(|| {
            let error = patient.read_media(&whole(nobody)).unwrap_err().to_string();
            assert!(
                error.contains(nobody) && error.contains("refused") && error.contains("5 tries"),
                "{error}"
            );
        });
    });
    let missing = format!("{}/no.png", server.url);
    let error = patient.probe(&whole(&missing)).unwrap_err().to_string();
    assert_eq!(error, format!("cannot read `{missing}`: 404 (NoSuchKey): there is no such object"));
    let strict = Stores::default();
    let error = strict.probe(&whole(&missing)).unwrap_err().to_string();
    assert!(error.contains("set the store option `allow_http` to `true`"), "{error}");
    let error = patient.list(&Location::parse(&server.url)).unwrap_err().to_string();
    assert!(error.contains("has no list"), "{error}");
    let unknown = Stores::new([("allow_plain".to_owned(), "x".to_owned())]);
    let error = unknown.probe(&whole("s3://bucket/key")).unwrap_err().to_string();
    assert!(error.contains("store option `allow_plain` is not known"), "{error}");
    for url in ["s3://bucket", "s3://bucket/", "s3://bucket/a//b", "https://", "http:///x"] {
        assert!(patient.probe(&whole(url)).is_err(), "{url}");
        assert!(patient.about(&Location::parse(url)).is_err(), "{url}");
    }
}

/// An answer of 404 whose page never ends: its first bytes are read, and the connection is given up.
#[test]
fn the_page_of_an_error_is_not_read_to_its_end() {
    let server = Server::start();
    let url = server.put("endless.png", [], Manner::Endless);
    let error = stores().probe(&whole(&url)).unwrap_err().to_string();
    assert_eq!(error, format!("cannot read `{url}`: 404: there is no such object"));
    // What the buffers of the system hold beyond our 64 KiB is not ours to say, but it is no endless page.
    assert!(server.sent() < 64 << 20);
}

#[test]
fn https_begins_with_a_handshake_and_says_what_the_server_answered() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("https://{}/picture.jpg", listener.local_addr().unwrap());
    // Ends with the test: no one waits for it.
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut hello = [0; 6];
            stream.read_exact(&mut hello).unwrap();
            // A TLS record (22, version 3) with a client's hello (1); anything else finds a closed door.
            if (hello[0], hello[1], hello[5]) == (22, 3, 1) {
                // A fatal alert: 40, no cipher in common.
                stream.write_all(&[21, 3, 3, 0, 2, 2, 40]).unwrap();
            }
        }
    });
    let error = Stores::default().probe(&whole(&url)).unwrap_err().to_string();
    assert!(error.contains("HandshakeFailure"), "{error}");
}

#[test]
fn a_broken_answer_is_tried_again_or_refused() {
    let server = Server::start();
    let bytes = fixture("pillow_flower_orientation_8.jpg");
    let stores = stores();
    let flaky = server.put("flaky.jpg", bytes.clone(), Manner::Flaky);
    assert_eq!(stores.probe(&whole(&flaky)).unwrap().0, expected(&bytes));
    assert_eq!(stores.traffic().0, 2);

    let old = server.put("old.jpg", bytes.clone(), Manner::WithoutRanges);
    assert_eq!(stores.probe(&whole(&old)).unwrap().0, expected(&bytes));
    let headless = Location::Remote(server.put("headless.jpg", bytes.clone(), Manner::WithoutHead));
    assert_eq!(stores.about(&headless).unwrap(), (bytes.len() as u64, "\"7\"".to_owned()));
    let empty = server.put("empty.jpg", [], Manner::Sound);
    assert_eq!(stores.open(&Location::Remote(empty.clone())).unwrap().len, 0);
    assert_eq!(stores.read_media(&whole(&empty)).unwrap(), [0_u8; 0]);

    // What is missing is asked for again, each time half of it comes; the bytes that came are no file.
    let cut = server.put("cut.jpg", bytes.clone(), Manner::Cut);
    let error = stores.read_media(&whole(&cut)).unwrap_err().to_string();
    assert!(error.contains(&cut), "{error}");

    let changing = Location::Remote(server.put("changing.jsonl", vec![b' '; 200_000], Manner::Changing));
    let mut all = Vec::new();
    let error = stores.open(&changing).unwrap().reader.read_to_end(&mut all).unwrap_err().to_string();
    assert!(error.contains("it changed while it was read"), "{error}");
}

fn bucket(server: &Server, scheme: &str) -> Stores {
    let options = match scheme {
        "s3" => [
            ("aws_endpoint", server.url.as_str()),
            ("aws_access_key_id", "key"),
            ("aws_secret_access_key", "secret"),
            ("aws_region", "nowhere-1"),
            ("allow_http", "true"),
        ]
        .to_vec(),
        _ => vec![
            ("google_base_url", server.url.as_str()),
            ("google_skip_signature", "true"),
            ("allow_http", "true"),
        ],
    };
    Stores::new(options.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())))
}

#[test]
fn buckets_are_read_and_listed() {
    for (scheme, manner) in [("s3", Manner::Signed), ("gs", Manner::Sound)] {
        let server = Server::start();
        let bytes = fixture("pillow_i_trns.png");
        for key in ["images/a.png", "images/b.png", "images/deep/c.png", "images/deep/d.png", "other.png"] {
            server.put(&format!("bucket/{key}"), bytes.clone(), manner);
        }
        server.put("bucket/images/50% #1.png", bytes.clone(), manner);
        let stores = bucket(&server, scheme);
        let images = Location::parse(&format!("{scheme}://bucket/images"));
        let listed: Vec<_> = stores.list(&images).unwrap().iter().map(ToString::to_string).collect();
        let names = ["50% #1.png", "a.png", "b.png", "deep"];
        assert_eq!(listed, names.map(|name| format!("{images}/{name}")));
        assert_eq!(server.log().len(), 2, "two pages of two");
        let root = stores.list(&Location::parse(&format!("{scheme}://bucket/"))).unwrap();
        assert_eq!(
            root,
            ["images", "other.png"].map(|name| Location::Remote(format!("{scheme}://bucket/{name}")))
        );
        let error = stores.list(&images.join("no")).unwrap_err().to_string();
        assert_eq!(error, format!("cannot list `{images}/no`: nothing is under it"));

        server.log();
        for name in ["a.png", "50% #1.png", "deep/../b.png", "./deep/c.png"] {
            let place = MediaPlace::Whole(images.join(name));
            assert_eq!(stores.probe(&place).unwrap().0, expected(&bytes), "{name}");
        }
        let path = if scheme == "s3" { "images/a.png" } else { "images%2Fa%2Epng" };
        assert_eq!(server.log()[0], format!("GET /bucket/{path} 0-65535"));
        assert_eq!(stores.about(&images.join("a.png")).unwrap(), (bytes.len() as u64, "\"7\"".to_owned()));
        server.put("bucket/closed.png", bytes, Manner::Forbidden);
        let error = stores.probe(&whole(&format!("{scheme}://bucket/closed.png"))).unwrap_err().to_string();
        let option = if scheme == "s3" { "aws_access_key_id" } else { "google_service_account" };
        assert!(error.contains("403 (AccessDenied)") && error.contains(option), "{error}");
    }
}

#[test]
fn options_come_from_the_environment_by_name() {
    let variables = [
        ("DFLOP_STORE_AWS_REGION", "ours"),
        ("DFLOP_STORE_ALLOW_PLAIN", "true"),
        ("AWS_REGION", "theirs"),
        ("AWS_PAGER", ""),
        ("HOME", "h"),
        ("GOOGLE_SERVICE_ACCOUNT", "f"),
    ];
    let options = options_among(variables.map(|(name, value)| (name.into(), value.into())));
    let expected = [
        ("aws_region", "theirs"),
        ("google_service_account", "f"),
        ("allow_plain", "true"),
        ("aws_region", "ours"),
    ];
    assert_eq!(options, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
}

/// Every file under `directory`, by path from it.
fn files(directory: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    let mut left = vec![directory.to_owned()];
    while let Some(next) = left.pop() {
        for entry in std::fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                left.push(path);
            } else {
                let name = path.strip_prefix(directory).unwrap().to_string_lossy().into_owned();
                found.push((name, std::fs::read(path).unwrap()));
            }
        }
    }
    found
}

#[test]
fn a_dataset_on_a_server_has_the_profile_of_the_same_files_on_disk() {
    let directory = tempfile::tempdir().unwrap();
    demo::write(directory.path(), 0, 24, |_, _| {}).unwrap();
    let server = Server::start();
    let mut media_bytes = 0;
    for (name, mut bytes) in files(&directory.path().join("data")) {
        // Demo images are small: as of photographs, most of the bytes are not header.
        if name.starts_with("media/") && Path::new(&name).extension().is_some_and(|end| end != "gif") {
            bytes.resize(bytes.len() + (1 << 20), 0);
            std::fs::write(directory.path().join("data").join(&name), &bytes).unwrap();
            media_bytes += bytes.len() as u64;
        }
        server.put(&name, bytes, Manner::Sound);
    }
    let local = ProfileSettings {
        media_root: Some(directory.path().join("data/media")),
        ..ProfileSettings::new(directory.path().join("data/images.jsonl"), directory.path().join("model"))
    };
    let remote = ProfileSettings {
        mixture: PathBuf::from(format!("{}/images.jsonl", server.url)),
        media_root: Some(PathBuf::from(format!("{}/media", server.url))),
        store_options: vec![("allow_http".to_owned(), "true".to_owned())],
        ..local.clone()
    };
    let here = profile(&local, &|_, _| {}).unwrap().profile;
    let mut samples = Vec::new();
    let outcome = profile_into(&remote, None, &mut samples, &|_| {}).unwrap();
    let there = DataProfile { samples, ..outcome.header };
    assert!(here.samples.len() > 10);
    for (a, b) in here.samples.iter().zip(&there.samples) {
        assert_eq!((&a.id, a.kind, &a.shape, a.media_bytes), (&b.id, b.kind, &b.shape, b.media_bytes));
        assert_eq!((a.record_hash, a.place), (b.record_hash, b.place));
    }
    assert_eq!(here.samples.len(), there.samples.len());
    assert_eq!(here.made_from, there.made_from);
    let (sent, log) = (server.sent(), server.log());
    assert_eq!((outcome.num_requests, outcome.received_bytes), (log.len() as u64, sent));
    assert!(sent * 10 < media_bytes, "{sent} of {media_bytes} bytes");
    let num_media = log.iter().filter(|line| line.starts_with("GET /media/")).count();

    let dataset = Dataset::open(&remote, there).unwrap();
    server.log();
    let mut read = 0;
    for sample in 0..dataset.len() {
        for medium in dataset.encode(SampleIndex(sample as u32)).unwrap().media {
            let name = medium.place.to_string().replace(&server.url, "");
            let path = directory.path().join("data").join(name.trim_start_matches('/'));
            assert!(dataset.stores().read_media(&medium.place).unwrap() == std::fs::read(path).unwrap());
            read += 1;
        }
    }
    assert_eq!(read, num_media, "one request a header");
}

/// Training reads a remote medium into memory: one that is too large is found before, by its header, and never read.
#[test]
fn a_medium_larger_than_memory_is_refused() {
    let server = Server::start();
    let mut bytes = fixture("pillow_flower_orientation_8.jpg");
    bytes.resize(1 << 20, 0);
    let url = server.put("vast.jpg", bytes, Manner::Vast);
    let rule = "a remote medium is read into memory and must have at most 4294967296";
    let stores = stores();
    let part = MediaPlace::Range {
        file: Location::parse(&url),
        start: 0,
        len: VAST_BYTES,
        name: "a.jpg".to_owned(),
    };
    for error in [
        stores.probe(&whole(&url)).unwrap_err(),
        stores.read_media(&whole(&url)).unwrap_err(),
        stores.read_media(&part).unwrap_err(),
    ] {
        let error = error.to_string();
        assert!(error.contains("it has 5368709120 bytes") && error.contains(rule), "{error}");
    }
}
