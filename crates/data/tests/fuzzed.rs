//! What fuzzing found, and inputs that reach far: the checks of the fuzz targets hold on every file of `fuzz/corpus`.

#![allow(clippy::unwrap_used, reason = "a test may give up, its helpers too")]

#[allow(missing_docs, unreachable_pub, dead_code, reason = "it is a library elsewhere")]
#[path = "../../../fuzz/lib.rs"]
mod targets;

use std::path::Path;

#[test]
fn the_corpus_passes_the_checks_of_its_targets() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    let mut num_files = 0;
    for directory in std::fs::read_dir(corpus).unwrap() {
        let directory = directory.unwrap();
        let target = directory.file_name().into_string().unwrap();
        for file in std::fs::read_dir(directory.path()).unwrap() {
            let path = file.unwrap().path();
            println!("{}", path.display());
            targets::check(&target, &std::fs::read(&path).unwrap());
            num_files += 1;
        }
    }
    assert!(num_files > 100, "{num_files} files");
}
