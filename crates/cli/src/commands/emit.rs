//! `dflop plan --emit`: the command or the job script that trains the plan on its cluster.

use super::foreign;
use crate::args::Launcher;
use dflop_types::RankedPlan;
use std::fmt::Write as _;
use std::path::Path;

/// Port of the first node on which torchrun's agents meet: torchrun's own default.
const PORT: u16 = 29_400;

/// What starts the training of a plan: for torchrun the command of each node, for Slurm a job script, for Kubernetes a manifest;
/// for other trainers their nearest arguments. Ends with a line end.
pub(super) fn launch(
    launcher: Launcher,
    plan: &RankedPlan,
    global_batch_size: u32,
    num_llm_layers: u32,
    ranks_per_node: u32,
    config: &Path,
) -> String {
    let ranks = plan.layout.num_ranks();
    let per_node = ranks_per_node.clamp(1, ranks.max(1));
    let nodes = ranks.div_ceil(per_node);
    let path = config.display().to_string();
    let config = path.replace('\'', r"'\''");
    let train = format!("--no-python dflop train --config '{config}'");
    let mut text = String::new();
    match launcher {
        Launcher::Torchrun if nodes == 1 => {
            let _ = writeln!(text, "torchrun --standalone --nproc-per-node {per_node} {train}");
        }
        Launcher::Torchrun => {
            let _ = writeln!(
                text,
                "# On each of the {nodes} nodes. HEAD is the address of the first, HERE that of the node itself: by these the nodes\n\
                 # find each other, also where a node's name is not its address.\n\
                 torchrun --nnodes {nodes} --nproc-per-node {per_node} --local-addr \"${{HERE:?}}\" --rdzv-backend c10d \
                 --rdzv-id dflop --rdzv-endpoint \"${{HEAD:?}}:{PORT}\" \
                 --rdzv-conf \"is_host=$([ \"$HERE\" = \"$HEAD\" ] && echo 1 || echo 0)\" {train}"
            );
        }
        Launcher::Kubernetes => text.push_str(&kubernetes(nodes, per_node, &path)),
        Launcher::Megatron => text.push_str(&foreign::megatron(plan, global_batch_size, num_llm_layers)),
        Launcher::Torchtitan => text.push_str(&foreign::torchtitan(plan, global_batch_size, num_llm_layers)),
        Launcher::Slurm => {
            // One agent a node; the signal reaches every rank two minutes before the time ends, and training ends in order.
            // A shell on each node, which torchrun takes the place of, fills in the node's own name.
            // `sed` reads all names: a reader that ends at the first one can end `scontrol`, and by `pipefail` the job.
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
                 HEAD=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | sed -n 1p)\n\
                 export HEAD\n\
                 srun bash -c 'exec torchrun --nnodes {nodes} --nproc-per-node {per_node} \
                 --local-addr \"$SLURMD_NODENAME\" --rdzv-backend c10d --rdzv-id \"$SLURM_JOB_ID\" \
                 --rdzv-endpoint \"$HEAD:{PORT}\" --rdzv-conf \"is_host=$((SLURM_NODEID == 0))\" \"$@\"' \
                 torchrun {train}"
            );
        }
    }
    text
}

/// An indexed Job, whose pods are the nodes, and the headless Service by whose names they find the first of them.
///
/// Fields as in the Kubernetes API `batch/v1` and "Job with Pod-to-Pod Communication" in its documentation, read on 2026-11-23.
fn kubernetes(nodes: u32, per_node: u32, config: &str) -> String {
    let meeting = if nodes == 1 {
        "--standalone".to_owned()
    } else {
        format!("--nnodes {nodes} --rdzv-backend c10d --rdzv-id dflop --rdzv-endpoint dflop-0.dflop:{PORT}")
    };
    // Without a shell: the signal that ends a pod reaches torchrun, and by it every rank.
    let words = format!("torchrun {meeting} --nproc-per-node {per_node} --no-python dflop train --config");
    let quoted = words.split(' ').map(str::to_owned).chain([config.replace('\'', "''")]);
    let command = quoted.map(|word| format!("            - '{word}'")).collect::<Vec<_>>().join("\n");
    format!(
        "# Put your own in the places of IMAGE (a container with dflop and torch) and CLAIM (a volume with configuration, data, model
# and room for the run, which all nodes read and write). Relative paths start at `workingDir`.
# not expressed: that all pods start or none (a scheduler of gangs, as Kueue, does it), network devices beside the pod's own
# not expressed: starting again after a failure: delete the Job, and create it with `--resume auto` behind the command
apiVersion: v1
kind: Service
metadata:
  name: dflop
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    job-name: dflop
---
apiVersion: batch/v1
kind: Job
metadata:
  name: dflop
spec:
  completionMode: Indexed
  completions: {nodes}
  parallelism: {nodes}
  backoffLimit: 0
  template:
    spec:
      subdomain: dflop
      restartPolicy: Never
      terminationGracePeriodSeconds: 120
      containers:
        - name: dflop
          image: IMAGE
          workingDir: /data
          command:
{command}
          resources:
            limits:
              nvidia.com/gpu: {per_node}
          volumeMounts:
            - name: data
              mountPath: /data
            - name: shared-memory
              mountPath: /dev/shm
      volumes:
        - name: data
          persistentVolumeClaim:
            claimName: CLAIM
        - name: shared-memory
          emptyDir:
            medium: Memory
"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_types::{Layout, PipelineOrder, PlanPrediction, Recomputation, Zero};

    fn plan(ranks: u32) -> RankedPlan {
        RankedPlan {
            layout: Layout::colocated(ranks, Zero::Nothing),
            num_microbatches: 1,
            pipeline_order: PipelineOrder::OneFOneB,
            recompute: Recomputation::NONE,
            is_eased: false,
            prediction: PlanPrediction::default(),
        }
    }

    #[test]
    fn one_node_needs_no_meeting_point() {
        assert_eq!(
            launch(Launcher::Torchrun, &plan(4), 16, 28, 8, Path::new("it's/dflop.yaml")),
            "torchrun --standalone --nproc-per-node 4 --no-python dflop train --config 'it'\\''s/dflop.yaml'\n"
        );
    }

    #[test]
    fn several_nodes_meet_at_the_first() {
        let command = launch(Launcher::Torchrun, &plan(64), 256, 28, 8, Path::new("dflop.yaml"));
        assert!(command.contains("--nnodes 8 --nproc-per-node 8"), "{command}");
        assert!(command.contains("--rdzv-endpoint \"${HEAD:?}:29400\""), "{command}");
        let job = launch(Launcher::Slurm, &plan(64), 256, 28, 8, Path::new("dflop.yaml"));
        assert!(job.starts_with("#!/bin/bash\n#SBATCH"), "{job}");
        assert!(job.contains("#SBATCH --nodes=8\n"), "{job}");
        assert!(job.contains("srun bash -c 'exec torchrun --nnodes 8 --nproc-per-node 8"), "{job}");
    }

    #[test]
    fn pods_are_nodes_and_meet_at_the_first() {
        let manifest = launch(Launcher::Kubernetes, &plan(64), 256, 28, 8, Path::new("it's/dflop.yaml"));
        assert!(
            manifest.contains("  completionMode: Indexed\n  completions: 8\n  parallelism: 8\n"),
            "{manifest}"
        );
        assert!(manifest.contains("  clusterIP: None\n"), "{manifest}");
        // The Service's name is the subdomain, and the Job's is that of its pods.
        for line in ["      subdomain: dflop\n", "    job-name: dflop\n", "- 'dflop-0.dflop:29400'\n"] {
            assert!(manifest.contains(line), "{manifest}");
        }
        assert!(manifest.contains("              nvidia.com/gpu: 8\n"), "{manifest}");
        assert!(
            manifest.contains("            - '--config'\n            - 'it''s/dflop.yaml'\n"),
            "{manifest}"
        );
        let one = launch(Launcher::Kubernetes, &plan(4), 16, 28, 8, Path::new("dflop.yaml"));
        assert!(one.contains("  completions: 1\n"), "{one}");
        assert!(
            one.contains("- '--standalone'\n            - '--nproc-per-node'\n            - '4'\n"),
            "{one}"
        );
    }
}
