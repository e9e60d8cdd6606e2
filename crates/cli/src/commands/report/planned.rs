//! The plans that the steps of a run were trained with.

use crate::Failure;
use crate::measured::StepSchedule;
use dflop_types::{Artifact, ArtifactError, ModelProfile, Plan, artifact};
use std::path::{Path, PathBuf};

/// The artifact that was read; `None` if there is no such file.
pub(super) fn optional<A>(read: Result<A, ArtifactError>) -> Result<Option<A>, Failure> {
    match read {
        Ok(artifact) => Ok(Some(artifact)),
        Err(ArtifactError::Missing { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// A plan that steps were trained with.
pub(in crate::commands) struct Planned {
    /// Its file.
    pub(in crate::commands) path: PathBuf,
    pub(in crate::commands) hash: String,
    pub(in crate::commands) plan: Plan,
    /// What it was made from; where that is not there, the model profile that is.
    pub(in crate::commands) model: Option<ModelProfile>,
}

impl Planned {
    /// The name of its file.
    pub(in crate::commands) fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// The plans that the steps were trained with, in the order of the steps; `plan.json` of `dir` where no step names one that is there.
    /// They are looked for in `dir`, and in `run`, which keeps copies: what stands in `dir` may have been made anew since.
    pub(in crate::commands) fn of(
        dir: &Path,
        run: Option<&Path>,
        schedules: &[StepSchedule],
    ) -> Result<Vec<Self>, Failure> {
        let mut hashes: Vec<&String> = Vec::new();
        for hash in schedules.iter().filter_map(|line| line.made_from.get("plan")) {
            if !hashes.contains(&hash) {
                hashes.push(hash);
            }
        }
        let dirs = || [Some(dir), run].into_iter().flatten();
        let usual_path = dir.join("plan.json");
        let usual: Option<Plan> = optional(artifact::read(&usual_path))?;
        let usual = usual.map(|plan| (usual_path.clone(), artifact::hash_of(&plan), plan));
        // A run that has changed its plan names more than one: others lie beside it under names like plan.live.json.
        let is_of_usual =
            usual.as_ref().is_some_and(|(_, hash, _)| hashes.iter().all(|found| *found == hash));
        let others = if is_of_usual { Vec::new() } else { named::<Plan>(dirs(), "plan.") };
        let mut known: Vec<(PathBuf, String, Plan)> = usual.into_iter().collect();
        for (path, plan) in others {
            known.push((path, artifact::hash_of(&plan), plan));
        }
        let mut found: Vec<&(PathBuf, String, Plan)> =
            hashes.iter().filter_map(|hash| known.iter().find(|(_, own, _)| own == *hash)).collect();
        if found.is_empty() {
            found.extend(known.iter().find(|(path, ..)| *path == usual_path));
        }
        let usual: Option<ModelProfile> = optional(artifact::read(&dir.join("model_profile.json")))?;
        let usual_hash = usual.as_ref().map(artifact::hash_of);
        let is_of_usual = |plan: &Plan| {
            plan.made_from.get("model_profile").is_none_or(|hash| Some(hash) == usual_hash.as_ref())
        };
        let others = if found.iter().all(|(_, _, plan)| is_of_usual(plan)) {
            Vec::new()
        } else {
            named::<ModelProfile>(dirs(), "model_profile.")
        };
        let model = |plan: &Plan| {
            let is_its =
                |model: &ModelProfile| plan.made_from.get("model_profile") == Some(&artifact::hash_of(model));
            let other = || others.iter().find(|(_, model)| is_its(model)).map(|(_, model)| model);
            if is_of_usual(plan) { usual.clone() } else { other().or(usual.as_ref()).cloned() }
        };
        let planned = |(path, hash, plan): &(PathBuf, String, Plan)| Self {
            path: path.clone(),
            hash: hash.clone(),
            plan: plan.clone(),
            model: model(plan),
        };
        Ok(found.into_iter().map(planned).collect())
    }
}

/// The artifacts that can be read and whose file is called like `plan.live.json`: of each directory by name.
fn named<'a, A: Artifact + serde::de::DeserializeOwned>(
    dirs: impl Iterator<Item = &'a Path>,
    start: &str,
) -> Vec<(PathBuf, A)> {
    dirs.flat_map(|dir| named_in(dir, start)).collect()
}

/// Those of one directory.
pub(in crate::commands) fn named_in<A: Artifact + serde::de::DeserializeOwned>(
    dir: &Path,
    start: &str,
) -> Vec<(PathBuf, A)> {
    let files = std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut names: Vec<String> = files
        .filter(|name| {
            name.starts_with(start) && Path::new(name).extension().is_some_and(|end| end == "json")
        })
        .collect();
    names.sort();
    let paths = names.into_iter().map(|name| dir.join(name));
    paths.filter_map(|path| Some((path.clone(), artifact::read(&path).ok()?))).collect()
}
