//! `dflop rehearse`: checked here, carried out by Python, as `dflop train`.

use super::python::{max_restarts, may_overwrite};
use super::{Inputs, beside};
use crate::args;
use crate::{Failure, Outcome, Request};
use dflop_types::artifact::MadeFrom;
use dflop_types::{Plan, artifact};
use serde_json::json;
use std::path::Path;

/// What a rehearsal takes of the machine's memory whatever its ranks, in bytes: dflop, torchrun's agent, and the process with
/// PyTorch and transformers whose forks the ranks are. Of 3, 8 and 16 ranks all processes together were measured (PSS) as
/// 777, 841 and 945 MiB.
const BASE_BYTES: u64 = 768 << 20;
/// What each rank takes more, in bytes: measured as 13 MiB, and as some 23 MiB in longer runs.
const RANK_BYTES: u64 = 40 << 20;

/// The request for `dflop rehearse`, with the plan checked against what is there now.
pub(super) fn run(arguments: &args::Rehearse) -> Result<Outcome, Failure> {
    let inputs = Inputs::read_to_rehearse(&arguments.files.inputs)?;
    let config = &inputs.config;
    let plan_path = beside(config, arguments.files.plan.as_ref(), "plan.json");
    let plan: Plan = artifact::read(&plan_path)?;
    inputs.check_plan(&plan_path, &plan)?;
    let num_ranks = plan.best.layout.num_ranks();
    check_numbers(arguments, num_ranks)?;
    // An external torchrun has seen to the memory of its machines.
    if std::env::var_os("RANK").is_none() {
        check_memory(num_ranks, available_bytes(Path::new("/proc/meminfo")))?;
    }
    let out = beside(config, arguments.out.as_ref(), "rehearsal");
    let may_overwrite = may_overwrite(&out, arguments.resume.as_deref(), arguments.force)?;
    // Giants that are refused, before any rank starts.
    inputs.batches(&plan)?;
    let made_from: MadeFrom = [
        ("plan".to_owned(), artifact::hash_of(&plan)),
        ("data_profile".to_owned(), inputs.data_profile.content_hash()),
    ]
    .into();
    Ok(Outcome::Python(Request {
        verb: "rehearse".to_owned(),
        arguments: json!({
            "config_path": arguments.files.inputs.config.config,
            "config": config,
            "plan": plan_path,
            "data_profile": inputs.data_profile_path,
            "model_profile": inputs.model_profile_path,
            "out": out,
            "steps": arguments.steps,
            "compare": false,
            "resume": arguments.resume,
            "may_overwrite": may_overwrite,
            "max_restarts": max_restarts(arguments.max_restarts, config, false),
            "made_from": made_from,
            "num_ranks": num_ranks,
            "rehearsal": {
                "speed": arguments.speed,
                "slow_ranks": arguments.slow_rank,
                "slow_shapes": arguments.slow_shapes,
                "network_latency_ns": (arguments.network_latency * 1e6).round() as u64,
                "kill": arguments.kill,
            },
            "json": arguments.json,
            // Ranks that sleep need no second thread.
            "environment": { "OMP_NUM_THREADS": "1" },
        }),
    }))
}

/// `Ok` if the numbers make sense for this plan.
fn check_numbers(arguments: &args::Rehearse, num_ranks: u32) -> Result<(), Failure> {
    let fail = |text: String| Err(Failure::new(text, None));
    if !(arguments.speed > 0.0 && arguments.speed <= 1e6) {
        return fail(format!("`--speed` is {}, must be above 0 and at most 1000000", arguments.speed));
    }
    if !(0.0..=1e6).contains(&arguments.network_latency) {
        return fail(format!("`--network-latency` is {}, must be 0 to 1000000", arguments.network_latency));
    }
    let ranks: Vec<u32> = arguments.slow_rank.iter().map(|slow| slow.rank).collect();
    if let Some((_, twice)) = ranks.iter().enumerate().find(|(at, rank)| ranks[..*at].contains(rank)) {
        return fail(format!("`--slow-rank` names rank {twice} twice, must be once"));
    }
    let slow = arguments.slow_rank.iter().map(|slow| ("--slow-rank", slow.rank));
    let killed = arguments.kill.iter().map(|kill| ("--kill", kill.rank));
    if let Some((flag, rank)) = slow.chain(killed).find(|(_, rank)| *rank >= num_ranks) {
        return fail(format!("`{flag}` names rank {rank}, the plan has {num_ranks}, counted from 0"));
    }
    match arguments.kill {
        Some(kill) if kill.step >= arguments.steps => {
            fail(format!("`--kill` names step {}, there are {}, counted from 0", kill.step, arguments.steps))
        }
        _ => Ok(()),
    }
}

/// `Ok` if a machine with so much free memory has enough for the ranks it starts. Only Linux says how much is free, and there
/// ranks are forks.
fn check_memory(num_ranks: u32, available_bytes: Option<u64>) -> Result<(), Failure> {
    let needed_bytes = BASE_BYTES + u64::from(num_ranks) * RANK_BYTES;
    match available_bytes {
        Some(bytes) if bytes < needed_bytes => Err(Failure::new(
            format!(
                "{num_ranks} ranks need about {}, this machine has {} free",
                dflop_types::memory_size(needed_bytes),
                dflop_types::memory_size(bytes)
            ),
            Some(
                "start `dflop rehearse` under torchrun on several machines, or plan for fewer ranks"
                    .to_owned(),
            ),
        )),
        _ => Ok(()),
    }
}

/// Memory that processes may still take; `None` where the system does not say.
fn available_bytes(meminfo: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(meminfo).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranks hold PyTorch together: 64 of them fit where 64 processes of their own, of 384 MiB, would take 24 GiB.
    #[test]
    fn ranks_need_what_forks_take() {
        assert!(check_memory(64, Some(4 << 30)).is_ok());
        assert!(check_memory(2, Some(1 << 30)).is_ok());
        assert!(check_memory(1024, None).is_ok(), "what no one knows forbids nothing");
        let told = check_memory(32, Some(1 << 30)).unwrap_err();
        assert_eq!(told.message, "32 ranks need about 2.00 GiB, this machine has 1.00 GiB free");
    }
}
