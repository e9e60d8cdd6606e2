//! `dflop.yaml`: the one file a person writes, validated at once.
//!
//! Every problem is listed with its line and path before anything runs; a misspelt key is one, and no default in silence.

mod cluster;
mod data;
mod error;
mod evaluation;
pub(crate) mod field;
mod model;
mod plan;
mod section;
mod train;

use crate::commands::models_write::named_model;
pub use cluster::ClusterSection;
pub(crate) use cluster::NODE_DEVICES;
use cluster::cluster_section;
pub use data::DataSection;
use data::{beside, data_section};
use dflop_data::DataError;
use dflop_data::profile::{OnBadSample, OnChangedMedia, ProfileSettings};
use dflop_data::yaml;
use dflop_plan::Objective;
use dflop_step::GiantRule;
use dflop_types::{Cluster, MadeFrom, Recipe, Trained, artifact};
pub use error::{ConfigError, ConfigProblem};
pub use evaluation::EvaluationSection;
use evaluation::evaluation_section;
pub use model::ModelSection;
use model::model_section;
pub use plan::PlanSection;
use plan::plan_section;
use saphyr::MarkedYaml;
use section::Section;
use serde::Serialize;
use std::path::{Path, PathBuf};
pub use train::TrainSection;
use train::{settle_precision, train_section};

/// The longest configuration that is read, in bytes: a person writes it.
const BYTES_MAX: u64 = 1 << 22;

/// The configuration with every default filled in; paths are relative to the directory of the file, resolved.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Config {
    /// Directory of `dflop.yaml`: where artifacts go unless a flag says otherwise.
    pub directory: PathBuf,
    /// The model.
    pub model: ModelSection,
    /// The data.
    pub data: DataSection,
    /// The cluster.
    pub cluster: ClusterSection,
    /// Training.
    pub train: TrainSection,
    /// Checkpoints.
    pub checkpoint: CheckpointSection,
    /// Evaluation.
    pub evaluation: EvaluationSection,
    /// The search for a plan.
    pub plan: PlanSection,
}

/// `checkpoint:`
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CheckpointSection {
    /// Steps from one checkpoint to the next; `null`: only at the end, and where a run is interrupted.
    pub every: Option<u64>,
    /// Checkpoints that are kept, the newest.
    pub keep: u64,
}

impl Config {
    /// What becomes of giants.
    pub fn giants(&self) -> GiantRule {
        GiantRule {
            // It was written by the policy itself.
            policy: self.train.giants.parse().unwrap_or_default(),
            llm_tokens_max: self.train.giant_llm_tokens,
            steps_max: self.train.giant_steps_max,
        }
    }

    /// What plans are ranked by.
    pub fn objective(&self) -> Objective {
        // It was checked when the file was read.
        self.plan.objective.parse().unwrap_or_default()
    }

    /// What trains.
    pub fn trained(&self) -> Trained {
        // It was written by the recipe itself.
        let recipe: Recipe = self.train.recipe.parse().unwrap_or_default();
        recipe.trained(self.train.lora_rank)
    }

    /// What is profiled, and how; a `model.family` is yet to be imported, by Python. Credentials of remote stores come
    /// from the environment.
    pub fn profile_settings(&self) -> ProfileSettings {
        ProfileSettings {
            mixture: self.data.mixture.clone(),
            media_root: self.data.media_root.clone(),
            model_dir: self.model.dir.clone(),
            named: self
                .model
                .name
                .as_deref()
                .and_then(|name| named_model(name, self.model.tokenizer.clone()).ok()),
            chat_template: self.data.chat_template.clone(),
            video_max_frames: self.data.video_max_frames,
            video_fps: self.data.video_fps,
            on_bad_sample: match self.data.on_bad_sample.as_str() {
                "skip" => OnBadSample::Skip,
                "substitute" => OnBadSample::Substitute,
                _ => OnBadSample::Fail,
            },
            on_changed_media: match self.data.on_changed_media.as_str() {
                "warn" => OnChangedMedia::Warn,
                _ => OnChangedMedia::Fail,
            },
            bad_samples_max_percent: self.data.bad_samples_max_percent,
            seed: self.train.seed,
            family: None,
            sample: None,
            part: None,
            // Credentials stand in the environment; the command line is where it is read.
            store_options: dflop_data::store::options_among(std::env::vars_os()),
        }
    }

    /// As [`Config::profile_settings`], of the samples that are held out.
    ///
    /// # Errors
    /// The rule, where there are none.
    pub fn evaluation_settings(&self) -> Result<ProfileSettings, String> {
        let mixture = self.evaluation.mixture.clone();
        let mixture = mixture.ok_or("`evaluation.mixture` is missing, must name the samples to evaluate")?;
        Ok(ProfileSettings {
            mixture,
            media_root: self.evaluation.media_root.clone(),
            ..self.profile_settings()
        })
    }

    /// Hashes of the model's files: `model_config`, `processor`, `tokenizer`.
    ///
    /// # Errors
    /// Those of reading them.
    pub fn model_hashes(&self) -> Result<MadeFrom, DataError> {
        match self.profile_settings().named {
            Some(model) => dflop_data::named_hashes(&model),
            None => dflop_data::model_hashes(&self.model.dir),
        }
    }

    /// The cluster as the planner sees it.
    pub fn cluster(&self) -> Cluster {
        Cluster {
            num_ranks: self.cluster.num_ranks,
            ranks_per_node: self.cluster.ranks_per_node,
            memory_budget_bytes: self.cluster.memory_budget_bytes,
        }
    }
}

/// The configuration at `path`.
///
/// # Errors
/// [`ConfigError`], with every problem of the file at once.
pub fn load(path: &Path) -> Result<Config, ConfigError> {
    load_for(Scope::All, path)
}

/// The configuration at `path`, for a verb that looks at the data alone: fields of `cluster` and `train` that are
/// there are checked, and those that are not are not asked for.
///
/// # Errors
/// As [`load`].
pub fn load_data(path: &Path) -> Result<Config, ConfigError> {
    load_for(Scope::Data, path)
}

/// The configuration at `path`, for a verb that plans: fields of `train` that do not decide a plan need not be there, and
/// `train.global_batch_size` is [`SAMPLES_A_RANK`] samples a rank.
///
/// # Errors
/// As [`load`].
pub fn load_plan(path: &Path) -> Result<Config, ConfigError> {
    load_for(Scope::Plan, path)
}

/// Samples of a rank and step where a plan is made and nothing says how many.
pub const SAMPLES_A_RANK: u32 = 4;

fn load_for(scope: Scope, path: &Path) -> Result<Config, ConfigError> {
    let text = artifact::read_text(path, BYTES_MAX).map_err(|source| {
        if source.kind() == std::io::ErrorKind::NotFound {
            ConfigError::Missing(path.to_owned())
        } else {
            ConfigError::Io { path: path.to_owned(), source }
        }
    })?;
    parse_for(scope, path, &text)
}

/// The sections that a verb needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scope {
    /// All that `dflop train` needs: `model`, `data`, `cluster` and `train`.
    All,
    /// `model` and `data`: the other sections may be missing; their fields then have the least value that is allowed.
    Data,
    /// All but what of `train` decides no plan.
    Plan,
}

/// The configuration in `text`; `path` names it in errors, and its directory is where relative paths start.
///
/// # Errors
/// [`ConfigError::Syntax`] and [`ConfigError::Unsound`].
pub fn parse(path: &Path, text: &str) -> Result<Config, ConfigError> {
    parse_for(Scope::All, path, text)
}

fn parse_for(scope: Scope, path: &Path, text: &str) -> Result<Config, ConfigError> {
    let documents = yaml::load::<MarkedYaml<'_>>(text)
        .map_err(|cause| ConfigError::Syntax { path: path.to_owned(), cause })?;
    let directory =
        path.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_path_buf();
    let mut problems = Vec::new();
    let mut top = Section::new("", text, documents.first(), &mut problems);

    let node = top.child("model");
    let mut section = Section::new("model", text, node, top.problems);
    let mut model = model_section(&mut section, &directory);
    section.finish();

    let node = top.child("data");
    let mut section = Section::new("data", text, node, top.problems);
    let data = data_section(&mut section, &directory);
    section.finish();

    let node = top.child("cluster");
    let mut section = Section::new("cluster", text, node, top.problems);
    let cluster = cluster_section(&mut section);
    section.finish();

    let node = top.child("train");
    let mut section = Section::new("train", text, node, top.problems);
    let mut train = train_section(&mut section);
    if let Err(rule) = settle_precision(&mut model.dtype, &mut train.precision, &cluster.device) {
        section.problem_at("precision", rule);
    }
    section.finish();

    let node = top.child("checkpoint");
    let mut section = Section::new("checkpoint", text, node, top.problems);
    let checkpoint = CheckpointSection {
        every: section.optional_count("every", 1..=1 << 40),
        keep: section.count("keep", 1..=1 << 20, Some(2)),
    };
    section.finish();

    let node = top.child("evaluation");
    let mut section = Section::new("evaluation", text, node, top.problems);
    let evaluation = evaluation_section(&mut section, |name| beside(&directory, name));
    section.finish();

    let node = top.child("plan");
    let mut section = Section::new("plan", text, node, top.problems);
    let plan = plan_section(&mut section);
    section.finish();
    top.finish();

    if scope == Scope::Plan {
        let is_of_train = |field: &str| field.starts_with("train.");
        if problems.iter().any(|problem| problem.is_missing && problem.field == "train.global_batch_size") {
            train.global_batch_size = cluster.num_ranks.saturating_mul(SAMPLES_A_RANK);
        }
        problems.retain(|problem| !(problem.is_missing && is_of_train(&problem.field)));
    }
    if scope == Scope::Data {
        let is_other = |field: &str| field.starts_with("cluster.") || field.starts_with("train.");
        problems.retain(|problem| !(problem.is_missing && is_other(&problem.field)));
    }
    if problems.is_empty() {
        Ok(Config { directory, model, data, cluster, train, checkpoint, evaluation, plan })
    } else {
        problems.sort_by_key(|problem| problem.line);
        Err(ConfigError::Unsound { path: path.to_owned(), problems })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) const GOOD: &str = "model: {dir: model}\ndata: {mixture: data/mixture.yaml}\ncluster: {num_ranks: 2}\ntrain: {global_batch_size: 64, steps: 4, learning_rate: 1e-3}\n";

    #[test]
    fn defaults_are_filled_in_and_paths_start_at_the_file() {
        let config = parse(Path::new("here/dflop.yaml"), GOOD).unwrap();
        assert_eq!(config.model.dir, Path::new("here/model"));
        assert_eq!(config.model.dtype, "float32");
        let dtype_of = |model: &str, device: &str| {
            let text = GOOD.replace("{dir: model}", model).replace("num_ranks: 2", device);
            parse(Path::new("here/dflop.yaml"), &text).unwrap().model.dtype
        };
        assert_eq!(dtype_of("{dir: model}", "num_ranks: 2, device: cuda"), "bfloat16");
        assert_eq!(dtype_of("{dir: model, dtype: float32}", "num_ranks: 2, device: cuda"), "float32");
        assert_eq!(config.checkpoint, CheckpointSection { every: None, keep: 2 });
        assert_eq!(config.data.video_max_frames, None);
        assert_eq!(config.cluster.ranks_per_node, 2);
        assert!((config.train.learning_rate - 1e-3).abs() < 1e-12);
        assert_eq!(config.train.num_microbatches, None);
        assert_eq!(config.train.bucket_tokens_max, None);
        assert_eq!(config.train.schedule, "aware");
        assert_eq!(config.train.prefetch_depth, 2);
    }

    #[test]
    fn whole_numbers_may_be_written_with_an_exponent() {
        let budget = |written: &str| {
            let cluster = format!("{{num_ranks: 2, memory_budget_bytes: {written}}}");
            parse(Path::new("dflop.yaml"), &GOOD.replace("{num_ranks: 2}", &cluster))
                .map(|config| config.cluster.memory_budget_bytes)
                .map_err(|error| error.to_string())
        };
        for written in ["8e9", "8.0e+9", "8000000000.0", "8000000000"] {
            assert_eq!(budget(written), Ok(Some(8_000_000_000)), "{written}");
        }
        // What is refused is shown as it was written, not as it was read.
        for written in ["8.5e0", "-1e3", "0.0", "1e16", "18446744073709551615", ".inf", ".nan", "0x0"] {
            let expected =
                format!("memory_budget_bytes: {written}, must be an integer from 1 to 1125899906842624");
            assert!(
                budget(written).is_err_and(|text| text.contains(&expected)),
                "{written}: {:?}",
                budget(written)
            );
        }
    }

    #[test]
    fn nodes_are_of_one_size_but_the_last() {
        let parsed = |cluster: &str| {
            parse(Path::new("dflop.yaml"), &GOOD.replace("{num_ranks: 2}", cluster))
                .map(|config| config.cluster.ranks_per_node)
                .map_err(|error| error.to_string())
        };
        assert_eq!(parsed("{num_ranks: 6, ranks_per_node: 3}"), Ok(3));
        // The last node has two ranks, or one.
        assert_eq!(parsed("{num_ranks: 6, ranks_per_node: 4}"), Ok(4));
        assert_eq!(parsed("{num_ranks: 17, device: h100}"), Ok(8));
        assert_eq!(parsed("{num_ranks: 3, device: h100}"), Ok(3));
        let text = parsed("{num_ranks: 6, ranks_per_node: 8, device: tpu}").unwrap_err();
        let rule = "line 3: cluster.ranks_per_node: 8, must not exceed `cluster.num_ranks`, 6";
        assert!(text.contains(rule) && text.contains("cluster.device"), "{text}");
        // Where one of the two is already wrong by itself, the comparison of the two is left out.
        let text = parsed("{num_ranks: 0, ranks_per_node: 4}").unwrap_err();
        assert!(!text.contains("must not exceed"), "{text}");
    }

    #[test]
    fn precision_and_dtype_say_the_same() {
        let both = |model: &str, train: &str| {
            let text = GOOD.replace("dir: model", &format!("dir: model{model}"));
            let text = text.replace("steps: 4", &format!("steps: 4{train}"));
            parse(Path::new("dflop.yaml"), &text)
                .map(|config| (config.model.dtype, config.train.precision))
                .map_err(|error| error.to_string())
        };
        let pair = |dtype: &str, precision: &str| Ok((dtype.to_owned(), precision.to_owned()));
        assert_eq!(both("", ""), pair("float32", "fp32"));
        assert_eq!(both("", ", precision: bf16"), pair("bfloat16", "bf16"));
        assert_eq!(both(", dtype: bfloat16", ""), pair("bfloat16", "bf16"));
        let text = both(", dtype: bfloat16", ", precision: fp32").unwrap_err();
        assert!(
            text.contains("line 4: train.precision: `fp32`, must be `bf16`: `model.dtype` is `bfloat16`"),
            "{text}"
        );
    }

    #[test]
    fn every_arm_can_train() {
        for arm in ["blind", "tokens", "balanced-ahead", "ordered", "shaped", "aware-ahead"] {
            let text = GOOD.replace("steps: 4", &format!("steps: 4, schedule: {arm}"));
            assert_eq!(parse(Path::new("dflop.yaml"), &text).unwrap().train.schedule, arm);
        }
    }

    #[test]
    fn a_recipe_says_what_trains() {
        let trained = |train: &str| {
            let text = GOOD.replace("steps: 4", &format!("steps: 4, {train}"));
            parse(Path::new("dflop.yaml"), &text).map(|config| config.trained()).map_err(|e| e.to_string())
        };
        let of = |encoder, llm, lora_rank| Ok(Trained { encoder, projector: true, llm, lora_rank });
        assert_eq!(trained("seed: 0"), of(true, true, 0));
        assert_eq!(trained("recipe: projector"), of(false, false, 0));
        assert_eq!(trained("recipe: frozen-encoder, lora_rank: 8"), of(false, true, 0));
        assert_eq!(trained("recipe: frozen-llm"), of(true, false, 0));
        assert_eq!(trained("recipe: lora, lora_rank: 8"), of(false, true, 8));
        let expected =
            "train.recipe: recipe `some`, must be one of: full, projector, frozen-encoder, frozen-llm, lora";
        assert!(trained("recipe: some").unwrap_err().contains(expected));
    }

    #[test]
    fn plans_are_ranked_by_the_mean_unless_the_file_says_otherwise() {
        let objective = |more: &str| {
            parse(Path::new("dflop.yaml"), &format!("{GOOD}{more}")).map(|config| config.objective())
        };
        assert_eq!(objective("").unwrap(), Objective::Mean);
        assert_eq!(objective("plan: {objective: p95}\n").unwrap(), Objective::P95);
        let error = objective("plan: {objective: p99}\n").unwrap_err().to_string();
        assert!(error.contains("line 5: plan.objective: `p99`, must be one of: mean, p95"), "{error}");
    }

    #[test]
    fn a_url_stays_a_url() {
        let text =
            GOOD.replace("data/mixture.yaml", "\"https://x/d.jsonl\", media_root: \"s3://bucket/images\"");
        let data = parse(Path::new("here/dflop.yaml"), &text).unwrap().data;
        assert_eq!(data.mixture.to_str(), Some("https://x/d.jsonl"));
        assert_eq!(data.media_root.unwrap().to_str(), Some("s3://bucket/images"));
    }

    #[test]
    fn all_problems_come_at_once_with_line_and_path() {
        let text = "model: {dir: model, dtyp: float32, family: rules.py}\ndata:\n  mixture: 3\n  on_bad_sample: drop\ncluster: {num_ranks: 0}\ntrain:\n  global_batch_size: -4\n  steps: 4\n  schedule: random\n  prefetch_depth: 0\n  giants: defer\n  bucket_tokens_max: 0\nextra: 1\n";
        let error = parse(Path::new("dflop.yaml"), text).unwrap_err();
        let text = error.to_string();
        for expected in [
            "line 1: model.dtyp: unknown key, did you mean `dtype`?",
            "line 1: model.family: `rules.py`, must be `transformers` or name a function of Python, for example `module:function`",
            "line 3: data.mixture: 3, must be text",
            "line 4: data.on_bad_sample: `drop`, must be one of: fail, skip, substitute",
            "line 5: cluster.num_ranks: 0, must be an integer from 1 to 100000",
            "line 7: train.global_batch_size: -4, must be an integer from 1 to 16777216",
            "line 9: train.schedule: arm `random`, must be one of: blind, tokens, ",
            "line 10: train.prefetch_depth: 0, must be an integer from 1 to 1000",
            "line 11: train.giants: `defer` needs `train.giant_llm_tokens`: which samples wait",
            "line 12: train.bucket_tokens_max: 0, must be an integer from 1 to 1099511627776",
            "line 13: extra: unknown key, known are: model, data, cluster, train, checkpoint",
        ] {
            assert!(text.contains(expected), "{expected}\n---\n{text}");
        }
    }

    #[test]
    fn missing_sections_are_named() {
        let error = parse(Path::new("dflop.yaml"), "model: {dir: m}\n").unwrap_err().to_string();
        for field in ["data.mixture", "cluster.num_ranks", "train.global_batch_size", "train.steps"] {
            assert!(error.contains(&format!("{field}: is missing")), "{error}");
        }
    }

    #[test]
    fn data_alone_asks_for_model_and_data() {
        let parse = |text: &str| parse_for(Scope::Data, Path::new("dflop.yaml"), text);
        let alone = "model: {dir: model}\ndata: {mixture: data/mixture.yaml}\n";
        assert_eq!(parse(alone).unwrap().train.seed, 0);
        assert_eq!(parse(&format!("{alone}train: {{seed: 7}}\n")).unwrap().train.seed, 7);
        assert_eq!(parse(GOOD).unwrap(), super::parse(Path::new("dflop.yaml"), GOOD).unwrap());
        // What is there is checked all the same, and its own sections are asked for.
        for (text, expected) in [
            (&format!("{alone}train: {{sead: 7}}\n")[..], "train.sead: unknown key, did you mean `seed`?"),
            (
                "model: {dir: model}\ndata: [a.jsonl]\n",
                "has 1 problem\n  line 2: data: must be a mapping of fields, as",
            ),
            (
                "model: {dir: model}\ndata: {jsonl: a.jsonl}\n",
                "line 2: data.jsonl: unknown key, did you mean `mixture`? It takes a file, a directory,",
            ),
            (
                "model: {path: model}\ndata: {mixture: a.jsonl, frames: 3}\ntrain: {lr: 1}\n",
                "line 1: model.path: unknown key, did you mean `dir`?\n  line 2: data.frames: unknown key, known are: mixture",
            ),
            (
                &format!("{alone}train: {{lr: 1}}\n")[..],
                "train.lr: unknown key, did you mean `learning_rate`?",
            ),
            (
                &format!("{alone}cluster: {{num_ranks: \"64\"}}\n"),
                "cluster.num_ranks: `64`, must be an integer from 1 to 100000, without quotes",
            ),
            (
                &format!("{alone}cluster: {{num_ranks: 0}}\n"),
                "cluster.num_ranks: 0, must be an integer from 1",
            ),
            ("model: {dir: model}\n", "data.mixture: is missing"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
