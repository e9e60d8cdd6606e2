use super::*;
use crate::error::DataError;
use proptest::prelude::*;
use std::path::Path;

#[test]
fn a_mixture_is_read_with_its_paths() {
    let text = "datasets:\n- json_path: a.json\n  sampling_strategy: first:10%\n- json_path: sub/b.jsonl\n  \
                image_folder: /images\n- {json_path: c.json, sampling_strategy: 'end:3'}\n";
    let mixture = parse(Path::new("mix/m.yaml"), text, None).unwrap();
    let seen: Vec<_> = mixture
        .sources
        .iter()
        .map(|s| (s.name.as_str(), s.location.to_string(), s.media_root.to_string(), s.sampling))
        .collect();
    assert_eq!(
        seen,
        [
            ("a.json", "mix/a.json".to_owned(), "mix".to_owned(), Sampling::First(Amount::Percent(10.0))),
            ("sub/b.jsonl", "mix/sub/b.jsonl".to_owned(), "/images".to_owned(), Sampling::All),
            ("c.json", "mix/c.json".to_owned(), "mix".to_owned(), Sampling::End(Amount::Count(3))),
        ]
    );
    let rooted = parse(Path::new("mix/m.yaml"), text, Some(Path::new("/root"))).unwrap();
    assert_eq!(rooted.sources[0].media_root, Location::parse("/root"));
    assert_eq!(rooted.sources[1].media_root, Location::parse("/images"));
}

#[test]
fn every_problem_is_named_with_its_line() {
    let text =
        "datasets:\n- json_path: a.json\n  sampling_stratgy: all\n- sampling_strategy: some\n- 3\nseed: 1\n";
    let Err(DataError::Mixture { problems, .. }) = parse(Path::new("m.yaml"), text, None) else {
        panic!("a broken mixture was taken");
    };
    insta::assert_snapshot!(problems.join("\n"), @r"
    line 3: datasets[0].sampling_stratgy: unknown key, known are path, json_path, sampling_strategy, media_root, image_folder, format, split, columns, ignore
    line 4: datasets[1].sampling_strategy: `some`, must be all, first:N, end:N or random:N, N a count or a percentage up to 100%
    line 4: datasets[1]: `path` or `json_path` is missing
    line 5: datasets[2]: it must be a mapping with `path` or `json_path`
    line 6: seed: unknown key, known are datasets
    ");
}

#[test]
fn a_source_has_a_form_a_split_and_columns() {
    let text = "datasets:\n- path: data/charts\n  format: huggingface\n  split: train\n  columns: {image: img, \
                question: query}\n- path: s3://bucket/a.parquet\n- {path: odd.txt, format: jsonl}\n";
    let mixture = parse(Path::new("mix/m.yaml"), text, None).unwrap();
    let [charts, remote, odd] = &mixture.sources[..] else { panic!("there are three") };
    assert_eq!((charts.format, charts.split.as_deref()), (Some(Format::HuggingFace), Some("train")));
    let pairs: Vec<_> = charts.columns.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
    assert_eq!(pairs, [("image", "img"), ("question", "query")]);
    let roots = mixture.sources.iter().map(|source| source.media_root.to_string()).collect::<Vec<_>>();
    assert_eq!(roots, ["mix/data/charts", "s3://bucket", "mix"]);
    assert_eq!((remote.format, odd.format), (None, Some(Format::Jsonl)));
}

#[test]
fn problems_of_forms_and_columns_are_named() {
    let text = "datasets:\n- path: a\n  json_path: b\n  format: csv\n  split: 3\n- path: a\n  columns: [x]\n\
                - path: a\n  columns:\n    imagee: x\n    image: x\n    images: x\n    id: 4\n\
                - path: a\n  ignore: x\n- path: a\n  columns: {image: x}\n  ignore: [x]\n";
    let Err(DataError::Mixture { problems, .. }) = parse(Path::new("m.yaml"), text, None) else {
        panic!("a broken mixture was taken");
    };
    let text = problems.join("\n").replace(&FIELDS.join(", "), "FIELDS");
    insta::assert_snapshot!(text, @r"
    line 3: datasets[0].json_path: the source is named twice
    line 4: datasets[0].format: `csv`, must be one of json, jsonl, parquet, arrow, huggingface, webdataset, energon
    line 5: datasets[0].split: it must be text
    line 7: datasets[1].columns: it must be a mapping of our names to theirs, as in {image: img}
    line 10: datasets[2].columns.imagee: unknown key, known are FIELDS
    line 12: datasets[2].columns.images: `x` has another name already
    line 13: datasets[2].columns.id: it must be text
    line 15: datasets[3].ignore: it must be a list of names, as in [thumbnail]
    line 16: datasets[4].ignore: `x` is named under `columns` too
    ");
}

#[test]
fn a_source_alone_is_a_mixture_of_one() {
    let directory = tempfile::tempdir().unwrap();
    let inside = read(directory.path(), None).unwrap();
    assert_eq!(inside.sources[0].media_root, Location::Local(directory.path().to_owned()));
    let file = read(Path::new("data/x.parquet"), None).unwrap();
    assert_eq!(file.sources[0].media_root, Location::parse("data"));
    assert_eq!(file.sources[0].name, "x.parquet");
    let remote = read(Path::new("s3://bucket/prefix"), Some(Path::new("/media"))).unwrap();
    assert_eq!(remote.sources[0].location, Location::parse("s3://bucket/prefix"));
    assert_eq!(remote.sources[0].media_root, Location::parse("/media"));
}

#[test]
fn columns_are_renamed_all_at_once() {
    let columns = |pairs: &[(&str, &str)]| {
        pairs.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect::<BTreeMap<_, _>>()
    };
    let record = serde_json::json!({"image": "a", "video": "b", "id": 1});
    let swapped = renamed(record.clone(), &columns(&[("image", "video"), ("video", "image")]));
    assert_eq!(swapped, serde_json::json!({"id": 1, "image": "b", "video": "a"}));
    let gone = renamed(record, &columns(&[("image", "img")]));
    assert_eq!(gone, serde_json::json!({"video": "b", "id": 1}));
    let source = Source {
        columns: columns(&[("image", "video")]),
        ignore: ["id".to_owned()].into(),
        ..Source::new(Location::parse("x.jsonl"))
    };
    assert_eq!(source.renamed(serde_json::json!({"video": "b", "id": 1})), serde_json::json!({"image": "b"}));
    assert_eq!(renamed(Value::from(3), &columns(&[("image", "img")])), Value::from(3));
}

#[test]
fn a_broken_yaml_says_where() {
    let error = parse(Path::new("m.yaml"), "datasets: [\n  {json_path: a", None).unwrap_err();
    assert!(error.to_string().contains("line"), "{error}");
}

proptest! {
    #[test]
    fn draws_are_ascending_and_of_the_size_asked(total in 0u64..400, count in 0u64..500, seed: u64) {
        for sampling in [Sampling::First, Sampling::End, Sampling::Random].map(|s| s(Amount::Count(count))) {
            let chosen = sampling.choose(total, seed, 0);
            prop_assert_eq!(chosen.len() as u64, count.min(total));
            prop_assert!(chosen.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert!(chosen.iter().all(|&position| position < total));
            prop_assert_eq!(&chosen, &sampling.choose(total, seed, 0));
        }
    }
}

#[test]
fn random_draws_differ_by_seed_and_source() {
    let half = Sampling::Random(Amount::Percent(50.0));
    assert_eq!(half.choose(101, 0, 0).len(), 51);
    assert_ne!(half.choose(101, 0, 0), half.choose(101, 1, 0));
    assert_ne!(half.choose(101, 0, 0), half.choose(101, 0, 1));
    assert_eq!(Sampling::First(Amount::Count(9)).missing(8), Some(9));
}
