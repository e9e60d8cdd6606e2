//! `dflop plan --emit`: the command or the job script that trains the plan on its cluster.

use super::foreign;
use crate::args::Launcher;
use dflop_types::RankedPlan;
use std::path::{Path, PathBuf};

/// What `dflop train` is told: an option, and a file or a word for it.
pub(super) type Told = (&'static str, PathBuf);

/// Port of the first node on which torchrun's agents meet: torchrun's own default.
const PORT: u16 = 29_400;

/// What starts the training of a plan: for torchrun the command of each node, for Slurm a job script, for Kubernetes a manifest;
/// for other trainers their nearest arguments. `told` is what the plan was made from and written to. Ends with a line end.
pub(super) fn launch(
    launcher: Launcher,
    plan: &RankedPlan,
    global_batch_size: u32,
    num_llm_layers: u32,
    ranks_per_node: u32,
    told: &[Told],
) -> String {
    let nodes = Nodes::of(plan.layout.num_ranks(), ranks_per_node);
    let quoted = |path: &Path| path.display().to_string().replace('\'', r"'\''");
    let told_in_shell = told.iter().map(|(name, path)| format!(" {name} '{}'", quoted(path)));
    let train = format!("--no-python dflop train{}", told_in_shell.collect::<String>());
    match launcher {
        Launcher::Torchrun => torchrun(&nodes, &train),
        Launcher::Kubernetes => kubernetes(&nodes, told),
        Launcher::Megatron => foreign::megatron(plan, global_batch_size, num_llm_layers),
        Launcher::Torchtitan => foreign::torchtitan(plan, global_batch_size, num_llm_layers),
        Launcher::Slurm => slurm(&nodes, &train),
    }
}

/// The nodes that the ranks of a plan stand on: all full, but for the last.
struct Nodes {
    number: u32,
    per_node: u32,
    /// Ranks of the last node, where these are fewer.
    of_last: Option<u32>,
}

impl Nodes {
    fn of(ranks: u32, ranks_per_node: u32) -> Self {
        let per_node = ranks_per_node.clamp(1, ranks.max(1));
        let of_last = Some(ranks % per_node).filter(|&left| left > 0);
        Self { number: ranks.div_ceil(per_node), per_node, of_last }
    }

    /// How the agents of several nodes find each other, and how many ranks each starts. `node` is an expression of the shell that
    /// has the number of the node, from 0; `meeting` is for nodes that are all alike.
    ///
    /// Agents that meet by themselves are numbered by their addresses. Where the last node has fewer ranks its place must be
    /// the last, or tensor groups would stand on two nodes: then each agent is told its number.
    fn agents(&self, node: &str, head: &str, meeting: &str) -> String {
        let Self { number, per_node, of_last } = self;
        match of_last {
            None => format!("--nnodes {number} --nproc-per-node {per_node} {meeting}"),
            Some(of_last) => format!(
                "--nnodes {number} --nproc-per-node \"$(({node} == {} ? {of_last} : {per_node}))\" --rdzv-backend static \
                 --node-rank \"$(({node}))\" --master-addr \"{head}\" --master-port {PORT}",
                number - 1
            ),
        }
    }
}

fn torchrun(nodes: &Nodes, train: &str) -> String {
    let Nodes { number, per_node, of_last } = nodes;
    if *number == 1 {
        return format!("torchrun --standalone --nproc-per-node {per_node} {train}\n");
    }
    let meeting = format!(
        "--local-addr \"${{HERE:?}}\" --rdzv-backend c10d \
         --rdzv-id dflop --rdzv-endpoint \"${{HEAD:?}}:{PORT}\" \
         --rdzv-conf \"is_host=$([ \"$HERE\" = \"$HEAD\" ] && echo 1 || echo 0)\""
    );
    let agents = nodes.agents("${NODE:?}", "${HEAD:?}", &meeting);
    let note = match of_last {
        None => format!(
            "# On each of the {number} nodes. HEAD is the address of the first, HERE that of the node itself: by these the nodes\n\
             # find each other, also where a node's name is not its address."
        ),
        Some(of_last) => format!(
            "# On each of the {number} nodes. HEAD is the address of the first, NODE the number of the node itself, from 0 to {}: the last\n\
             # one has {of_last} of the ranks, each of the others {per_node}.",
            number - 1
        ),
    };
    format!("{note}\ntorchrun {agents} {train}\n")
}

fn slurm(nodes: &Nodes, train: &str) -> String {
    let Nodes { number, per_node, .. } = nodes;
    let meeting = format!(
        "--local-addr \"$SLURMD_NODENAME\" --rdzv-backend c10d --rdzv-id \"$SLURM_JOB_ID\" \
         --rdzv-endpoint \"$HEAD:{PORT}\" --rdzv-conf \"is_host=$((SLURM_NODEID == 0))\""
    );
    let agents = nodes.agents("SLURM_NODEID", "$HEAD", &meeting);
    // One agent a node. Two minutes before the time ends Slurm signals it, and it signals its ranks: training ends in order.
    // SIGUSR1 is none of the signals that torchrun handles by itself.
    // A shell on each node, which torchrun takes the place of, fills in the node's own name.
    // `sed` reads all names: a reader that ends at the first one can end `scontrol`, and by `pipefail` the job.
    format!(
        "#!/bin/bash\n\
         #SBATCH --job-name=dflop\n\
         #SBATCH --nodes={number}\n\
         #SBATCH --ntasks-per-node=1\n\
         #SBATCH --gpus-per-node={per_node}\n\
         #SBATCH --exclusive\n\
         #SBATCH --signal=USR1@120\n\
         set -euo pipefail\n\
         HEAD=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | sed -n 1p)\n\
         export HEAD\n\
         srun bash -c 'exec torchrun --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 {agents} \"$@\"' \
         torchrun {train}\n"
    )
}

/// An indexed Job, whose pods are the nodes, and the headless Service by whose names they find the first of them.
///
/// Fields as in the Kubernetes API `batch/v1` and "Job with Pod-to-Pod Communication" in its documentation, read on 2026-11-23.
fn kubernetes(nodes: &Nodes, told: &[Told]) -> String {
    let Nodes { number, per_node, of_last } = nodes;
    let meeting = format!("--rdzv-backend c10d --rdzv-id dflop --rdzv-endpoint dflop-0.dflop:{PORT}");
    let train = "--no-python dflop train";
    // Without a shell, or with one that torchrun takes the place of: the signal that ends a pod reaches torchrun, and by it
    // every rank.
    let words: Vec<String> = match (number, of_last) {
        (1, _) => format!("torchrun --standalone --nproc-per-node {per_node} {train}")
            .split(' ')
            .map(str::to_owned)
            .collect(),
        (_, None) => format!("torchrun --nnodes {number} {meeting} --nproc-per-node {per_node} {train}")
            .split(' ')
            .map(str::to_owned)
            .collect(),
        (_, Some(_)) => {
            let agents = nodes.agents("JOB_COMPLETION_INDEX", "dflop-0.dflop", &meeting);
            let shell = ["sh", "-c"].map(str::to_owned);
            shell
                .into_iter()
                .chain([format!("exec torchrun {agents} {train} \"$@\""), "torchrun".to_owned()])
                .collect()
        }
    };
    let nodes = number;
    let told = told.iter().flat_map(|(name, path)| [(*name).to_owned(), path.display().to_string()]);
    let quoted = words.into_iter().chain(told.map(|word| word.replace('\'', "''")));
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

    fn config(path: &str) -> [Told; 1] {
        [("--config", PathBuf::from(path))]
    }

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
            launch(Launcher::Torchrun, &plan(4), 16, 28, 8, &config("it's/dflop.yaml")),
            "torchrun --standalone --nproc-per-node 4 --no-python dflop train --config 'it'\\''s/dflop.yaml'\n"
        );
    }

    #[test]
    fn several_nodes_meet_at_the_first() {
        let command = launch(Launcher::Torchrun, &plan(64), 256, 28, 8, &config("dflop.yaml"));
        assert!(command.contains("--nnodes 8 --nproc-per-node 8"), "{command}");
        assert!(command.contains("--rdzv-endpoint \"${HEAD:?}:29400\""), "{command}");
        let job = launch(Launcher::Slurm, &plan(64), 256, 28, 8, &config("dflop.yaml"));
        assert!(job.starts_with("#!/bin/bash\n#SBATCH"), "{job}");
        assert!(job.contains("#SBATCH --nodes=8\n"), "{job}");
        assert!(job.contains("srun bash -c 'exec torchrun --signals-to-handle SIGTERM,"), "{job}");
        assert!(job.contains(",SIGUSR1 --nnodes 8 --nproc-per-node 8"), "{job}");
    }

    /// 17 ranks on nodes of eight: the agents are numbered, so that the node with one rank is the last.
    #[test]
    fn the_last_node_has_what_is_left() {
        let of = |launcher| launch(launcher, &plan(17), 64, 28, 8, &config("dflop.yaml"));
        let torchrun = of(Launcher::Torchrun);
        let meeting = "--nnodes 3 --nproc-per-node \"$((${NODE:?} == 2 ? 1 : 8))\" --rdzv-backend static \
                       --node-rank \"$((${NODE:?}))\" --master-addr \"${HEAD:?}\" --master-port 29400 --no-python";
        assert!(torchrun.contains(meeting) && torchrun.contains("# one has 1 of the ranks"), "{torchrun}");
        let job = of(Launcher::Slurm);
        assert!(job.contains("#SBATCH --nodes=3\n") && job.contains("#SBATCH --gpus-per-node=8\n"), "{job}");
        assert!(job.contains("--nproc-per-node \"$((SLURM_NODEID == 2 ? 1 : 8))\""), "{job}");
        let manifest = of(Launcher::Kubernetes);
        let start = "            - 'sh'\n            - '-c'\n            - 'exec torchrun --nnodes 3 ";
        assert!(manifest.contains(start), "{manifest}");
        let end = "\"$@\"'\n            - 'torchrun'\n            - '--config'\n            - 'dflop.yaml'\n";
        assert!(manifest.contains(end), "{manifest}");
        assert!(manifest.contains("  completions: 3\n"), "{manifest}");
    }

    #[test]
    fn pods_are_nodes_and_meet_at_the_first() {
        let manifest = launch(Launcher::Kubernetes, &plan(64), 256, 28, 8, &config("it's/dflop.yaml"));
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
        let one = launch(Launcher::Kubernetes, &plan(4), 16, 28, 8, &config("dflop.yaml"));
        assert!(one.contains("  completions: 1\n"), "{one}");
        assert!(
            one.contains("- '--standalone'\n            - '--nproc-per-node'\n            - '4'\n"),
            "{one}"
        );
    }
}
