//! `dflop plan --emit`: the command or the job script that trains the plan on its cluster.

use super::foreign;
use crate::args::Launcher;
use dflop_types::RankedPlan;
use std::fmt::Write as _;
use std::path::Path;

/// Port of the first node on which torchrun's agents meet: torchrun's own default.
const PORT: u16 = 29_400;

/// What starts the training of a plan: for torchrun the command of each node, for Slurm a job script; for other trainers their
/// nearest arguments. Ends with a line end.
pub(super) fn launch(
    launcher: Launcher,
    plan: &RankedPlan,
    global_batch_size: u32,
    ranks_per_node: u32,
    config: &Path,
) -> String {
    let ranks = plan.layout.num_ranks();
    let per_node = ranks_per_node.clamp(1, ranks.max(1));
    let nodes = ranks.div_ceil(per_node);
    let config = config.display().to_string().replace('\'', r"'\''");
    let train = format!("--no-python dflop train --config '{config}'");
    let mut text = String::new();
    match launcher {
        Launcher::Torchrun if nodes == 1 => {
            let _ = writeln!(text, "torchrun --standalone --nproc-per-node {per_node} {train}");
        }
        Launcher::Torchrun => {
            let _ = writeln!(
                text,
                "# On each of the {nodes} nodes; HEAD is the address of the first.\n\
                 torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d --rdzv-id dflop \
                 --rdzv-endpoint \"$HEAD:{PORT}\" {train}"
            );
        }
        Launcher::Megatron => text.push_str(&foreign::megatron(plan, global_batch_size)),
        Launcher::Torchtitan => text.push_str(&foreign::torchtitan(plan, global_batch_size)),
        Launcher::Slurm => {
            // One agent a node; the signal reaches every rank two minutes before the time ends, and training ends in order.
            let _ = writeln!(
                text,
                "#!/bin/bash\n\
                 #SBATCH --job-name=dflop\n\
                 #SBATCH --nodes={nodes}\n\
                 #SBATCH --ntasks-per-node=1\n\
                 #SBATCH --gpus-per-node={per_node}\n\
                 #SBATCH --exclusive\n\
                 #SBATCH --signal=USR1@120\n\
                 set -euo pipefail\n\
                 HEAD=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | head -n 1)\n\
                 srun torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d \
                 --rdzv-id \"$SLURM_JOB_ID\" --rdzv-endpoint \"$HEAD:{PORT}\" {train}"
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_types::{Layout, PipelineOrder, PlanPrediction, Recompute, Zero};

    fn plan(ranks: u32) -> RankedPlan {
        RankedPlan {
            layout: Layout::colocated(ranks, Zero::Nothing),
            num_microbatches: 1,
            pipeline_order: PipelineOrder::OneFOneB,
            recompute: Recompute::None,
            prediction: PlanPrediction::default(),
        }
    }

    #[test]
    fn one_node_needs_no_meeting_point() {
        assert_eq!(
            launch(Launcher::Torchrun, &plan(4), 16, 8, Path::new("it's/dflop.yaml")),
            "torchrun --standalone --nproc-per-node 4 --no-python dflop train --config 'it'\\''s/dflop.yaml'\n"
        );
    }

    #[test]
    fn several_nodes_meet_at_the_first() {
        let command = launch(Launcher::Torchrun, &plan(64), 256, 8, Path::new("dflop.yaml"));
        assert!(command.contains("--nnodes 8 --nproc-per-node 8"), "{command}");
        assert!(command.contains("--rdzv-endpoint \"$HEAD:29400\""), "{command}");
        let job = launch(Launcher::Slurm, &plan(64), 256, 8, Path::new("dflop.yaml"));
        assert!(job.starts_with("#!/bin/bash\n#SBATCH"), "{job}");
        assert!(job.contains("#SBATCH --nodes=8\n"), "{job}");
        assert!(job.contains("srun torchrun --nnodes 8 --nproc-per-node 8"), "{job}");
    }
}
