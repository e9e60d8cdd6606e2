//! `dflop profile data`: a dataset in, one shape a sample out.

use super::{beside, progress_bar};
use crate::args;
use crate::config;
use crate::{Failure, Outcome, Request};
use dflop_data::family::GivenFamily;
use dflop_data::profile::{Previous, ProfileSettings, ProfiledRows, Progress, profile_into};
use dflop_data::{DataError, problems, summary, table};
use dflop_types::{ProfilePart, counted, thousands};
use indicatif::ProgressBar;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Name of the profile of the samples that are held out, beside the configuration.
pub(super) const EVALUATION_FILE_NAME: &str = "evaluation_profile.parquet";

/// The data profile, or the request that Python imports the function which gives its shapes.
pub(super) fn run(arguments: &args::ProfileData, family: Option<&GivenFamily>) -> Result<Outcome, Failure> {
    profile(arguments, family, &|profiled| {
        out!("{}", summary::text_of(&profiled.header, &profiled.statistics, &profiled.notices));
    })
}

/// Makes the data profile for another command: its stdout stays free, and notes go to stderr. A configuration whose shapes
/// a function gives is refused, because only Python can call it.
pub(super) fn run_quietly(arguments: &args::ProfileData) -> Result<(), Failure> {
    // What another command goes on with says at least that samples are missing.
    let show = |profiled: &ProfiledRows| {
        let bad = profiled.header.problems.len() as u64;
        if bad > 0 {
            talk!(
                "note: of {} {bad} cannot be used and left out or replaced (`data.on_bad_sample`): `dflop show data_profile.parquet` lists them",
                counted(profiled.num_samples, "sample")
            );
        }
    };
    match profile(arguments, None, &show)? {
        Outcome::Done(_) => Ok(()),
        Outcome::Python(_) => Err(Failure::new(
            "`model.family` is a rule of Python, and no data profile is there",
            Some("make it with `dflop profile data`".to_owned()),
        )),
    }
}

fn profile(
    arguments: &args::ProfileData,
    family: Option<&GivenFamily>,
    show: &dyn Fn(&ProfiledRows),
) -> Result<Outcome, Failure> {
    let config = config::load_data(&arguments.config.config)?;
    if let (Some(name), None) = (&config.model.family, family) {
        let directory = config.model.family_directory(&config.directory);
        let arguments = json!({ "family": name, "directory": directory });
        return Ok(Outcome::Python(Request { verb: "profile_data".to_owned(), arguments }));
    }
    let settings = ProfileSettings {
        family: family.cloned(),
        sample: arguments.sample,
        part: arguments.shard,
        ..if arguments.evaluation {
            config.evaluation_settings().map_err(|rule| Failure::new(rule, None))?
        } else {
            config.profile_settings()
        }
    };
    let name = if arguments.evaluation { EVALUATION_FILE_NAME } else { table::FILE_NAME };
    let path = beside(&config, arguments.out.as_ref(), &default_name(name, arguments.shard));
    // This is checked first: a file that must not be replaced cannot be an earlier profile.
    let mut rows = table::Writer::create(&path)?;
    let previous = if arguments.fresh { None } else { read_previous(&path) };

    let bar = ProfileBar::new();
    let outcome = profile_into(&settings, previous, &mut rows, &|at| bar.draw(at));
    bar.clear();
    let outcome = outcome.map_err(|error| leave_problems(&path, error))?;
    show(&outcome);
    if outcome.num_reused > 0 {
        talk!(
            "{} of {} samples are as in the earlier profile and were taken over",
            thousands(outcome.num_reused),
            thousands(outcome.num_samples)
        );
    }
    if outcome.num_requests > 0 {
        talk!("{}", traffic(outcome.num_requests, outcome.received_bytes));
    }
    rows.finish(&outcome.header)?;
    // What an earlier run failed on is mended.
    problems::write(&failed_path(&path), &[], &[])?;
    talk!("wrote {}", path.display());
    Ok(Outcome::Done(0))
}

/// What remote stores were asked and what they sent, in one line.
fn traffic(num_requests: u64, bytes: u64) -> String {
    let requests = if num_requests == 1 { "request" } else { "requests" };
    format!("{} {requests} to remote stores, {} bytes received", thousands(num_requests), thousands(bytes))
}

/// Name of the profile beside the configuration.
fn default_name(whole: &str, part: Option<ProfilePart>) -> String {
    let Some(part) = part else { return whole.to_owned() };
    let stem = whole.trim_end_matches(".parquet");
    format!("{stem}-{}-of-{}.parquet", part.index, part.num_parts)
}

/// The profile at `path`, to take rows over; one that cannot be read is no reason not to make it again.
fn read_previous(path: &Path) -> Option<Previous<'static>> {
    if !path.is_file() {
        return None;
    }
    let previous =
        table::header(path).and_then(|(header, _)| Ok(Previous { header, rows: table::rows(path)? }));
    match previous {
        Ok(previous) => Some(previous),
        Err(error) => {
            talk!("warning: every sample is measured, the earlier profile cannot be read: {error}");
            None
        }
    }
}

/// The profile that a failed run did not write. Its problems have a name of their own: those beside the profile at `path`
/// belong to the earlier one, which stays.
fn failed_path(path: &Path) -> PathBuf {
    path.with_extension("failed.parquet")
}

/// The error, with the table of all problems left beside the profile at `path` where there are problems.
fn leave_problems(path: &Path, error: DataError) -> Failure {
    let written = match &error {
        DataError::Samples { problems, files, .. }
        | DataError::TooManyBad { problems, files, .. }
        | DataError::NoSamples { problems, files, .. }
            if !problems.is_empty() =>
        {
            problems::write(&failed_path(path), problems, files)
        }
        _ => return error.into(),
    };
    let mut failure = Failure::from(error);
    let whereabouts = match written {
        Ok(table) => format!("all of them: {}", table.display()),
        Err(error) => format!("their table was not written: {error}"),
    };
    failure.message = format!("{}\n  {whereabouts}", failure.message);
    failure
}

/// The progress of a profile with its rate: by samples where their number is known, else by bytes.
struct ProfileBar {
    bar: ProgressBar,
    start: Instant,
    /// When it was drawn last, in milliseconds from the start.
    drawn_ms: AtomicU64,
}

impl ProfileBar {
    /// Time between two drawings, in milliseconds.
    const PAUSE_MS: u64 = 100;

    fn new() -> Self {
        let bar = progress_bar(0, "reading headers and text");
        bar.set_style(super::bar_style("{msg} [{bar:30}] {percent} %, {eta} left"));
        Self { bar, start: Instant::now(), drawn_ms: AtomicU64::new(0) }
    }

    fn draw(&self, at: Progress) {
        let now_ms = self.start.elapsed().as_millis() as u64;
        let drawn_ms = self.drawn_ms.load(Ordering::Relaxed);
        let is_mine = now_ms >= drawn_ms + Self::PAUSE_MS
            && self.drawn_ms.compare_exchange(drawn_ms, now_ms, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if !is_mine {
            return;
        }
        let (done, all) = at.num_samples.map_or((at.bytes, at.num_bytes), |all| (at.samples, all));
        self.bar.set_length(all);
        self.bar.set_position(done);
        let of = at.num_samples.map(|all| format!(" of {}", thousands(all))).unwrap_or_default();
        let rate = at.samples * 1000 / now_ms.max(1);
        self.bar.set_message(format!("{}{of} samples, {}/s", thousands(at.samples), thousands(rate)));
    }

    fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_is_drawn_by_samples_or_bytes() {
        let bar = ProfileBar { drawn_ms: AtomicU64::new(0), start: Instant::now(), ..ProfileBar::new() };
        std::thread::sleep(std::time::Duration::from_millis(ProfileBar::PAUSE_MS));
        bar.draw(Progress { samples: 5, num_samples: Some(10), bytes: 1, num_bytes: 100 });
        assert_eq!((bar.bar.position(), bar.bar.length()), (5, Some(10)));
        bar.draw(Progress { samples: 6, num_samples: None, bytes: 1, num_bytes: 100 });
        assert_eq!(bar.bar.position(), 5, "drawn again at once");
        bar.clear();
    }

    #[test]
    fn traffic_is_told_in_one_line() {
        assert_eq!(traffic(1, 65_536), "1 request to remote stores, 65,536 bytes received");
        assert_eq!(traffic(1_200, 0), "1,200 requests to remote stores, 0 bytes received");
    }

    #[test]
    fn a_part_has_a_name_of_its_own() {
        let part = Some(ProfilePart { index: 0, num_parts: 8 });
        assert_eq!(default_name(table::FILE_NAME, part), "data_profile-0-of-8.parquet");
        assert_eq!(default_name(EVALUATION_FILE_NAME, part), "evaluation_profile-0-of-8.parquet");
    }
}
