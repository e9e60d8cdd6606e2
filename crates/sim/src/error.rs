//! Why something cannot be simulated.

use dflop_types::{Action, Hint, Layout, PipelineOrder, Rank};
use std::fmt::{self, Write as _};
use thiserror::Error;

/// Why a step cannot be simulated.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SimError {
    /// The text is not JSON.
    #[error("durations are not JSON: {cause}")]
    Json {
        /// What is wrong, with line and column.
        cause: String,
    },
    /// The input contradicts itself; every violation is listed.
    #[error("{subject} cannot be simulated{}", list(violations))]
    Unsound {
        /// What was to be simulated, as in `the durations`.
        subject: &'static str,
        /// All that is wrong with it.
        violations: Vec<Violation>,
    },
    /// A sum of times does not fit 64 bits.
    #[error("the times of {} add up to more than {} ns", counted(*num_ranks, "rank"), u64::MAX)]
    Overflow {
        /// Ranks that take part.
        num_ranks: usize,
    },
    /// The action lists make ranks wait for each other. The pair is the first of the circle, by rank.
    #[error(
        "the action lists never end: rank {rank} waits at `{action}` for `{input}` of rank {input_rank}, \
         which waits at `{input_action}`"
    )]
    Deadlock {
        /// The lowest of the ranks that wait in a circle.
        rank: Rank,
        /// The action it cannot start.
        action: Action,
        /// The rank it waits for; the same rank where a list has a backward before its forward.
        input_rank: Rank,
        /// What it waits for.
        input: Action,
        /// The action that the other rank cannot start.
        input_action: Action,
    },
}

impl Hint for SimError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::Json { .. } => Some(
                r#"write `{"forward_ns": [[1]], "backward_ns": [[2]], "transfer_ns": 0}`, a list a stage"#
                    .into(),
            ),
            Self::Overflow { .. } => Some("give times in nanoseconds".into()),
            Self::Deadlock { .. } => {
                Some("take the lists of `order::actions`, or move a backward ahead".into())
            }
            Self::Unsound { .. } => None,
        }
    }
}

/// One thing wrong with an input, with its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Violation {
    /// A field is not there.
    Missing {
        /// The field.
        path: &'static str,
    },
    /// A field that we do not know.
    Unknown {
        /// The field.
        path: String,
    },
    /// A value of the wrong kind.
    Kind {
        /// The place, as in `forward_ns[1][2]`.
        path: String,
        /// The value, cut short where it is long.
        found: String,
        /// What should stand there.
        expected: &'static str,
    },
    /// A number that must not be 0.
    Zero {
        /// The place.
        path: String,
        /// The name of what is missing, in the singular.
        what: &'static str,
    },
    /// Two parts of the input differ in a count.
    Count {
        /// The place of the one.
        path: String,
        /// How many it has.
        found: usize,
        /// What is counted, in the singular.
        what: &'static str,
        /// The other, as in `stage 0`.
        other: &'static str,
        /// How many that has.
        expected: usize,
    },
    /// LLM replicas that an encoder replica feeds are not in ascending order, or there is no such replica.
    Fed {
        /// The place, as in `feeds[1][0]`.
        path: String,
        /// How many LLM replicas there are.
        replicas: u32,
    },
    /// Tensor parallelism is not simulated: a rank stands for a whole tensor-parallel group.
    TensorParallel {
        /// The place.
        path: &'static str,
        /// The degree.
        degree: u32,
    },
    /// Colocated components have different degrees, or several stages.
    Colocated {
        /// The layout.
        layout: Layout,
    },
    /// Ranks must start each action together, but their lists differ.
    Apart {
        /// The rank whose list is not that of rank 0.
        rank: usize,
    },
    /// More actions than the simulator numbers.
    TooMany {
        /// Actions of the step.
        actions: u128,
    },
    /// An action is not in its list exactly once, or was not measured exactly once.
    NotOnce {
        /// The list, as in `lists[2]`.
        path: String,
        /// The action.
        action: Action,
        /// How often it is there.
        count: usize,
    },
    /// Actions of the step that were not measured.
    Unmeasured {
        /// How many.
        missing: usize,
        /// Actions of the step.
        total: usize,
        /// The rank of the first.
        rank: Rank,
        /// The first.
        action: Action,
    },
    /// Things that cannot be dealt out evenly, for example 6 stages over 4 ranks.
    Uneven {
        /// How many things there are.
        count: u32,
        /// The name of the things, as in `stages`.
        what: &'static str,
        /// Over how many parts they are dealt.
        parts: u32,
        /// The name of the parts, as in `ranks`.
        of: &'static str,
    },
    /// A pipeline order that cannot be simulated as asked.
    Order {
        /// The place.
        path: &'static str,
        /// The order.
        order: PipelineOrder,
        /// What it needs.
        needs: &'static str,
    },
    /// A microbatch that takes more than its rank may hold.
    TooLarge {
        /// The place, as in `holding.held[1][2]`.
        path: String,
        /// What it takes.
        held: u64,
        /// What the rank may hold.
        cap: u64,
    },
    /// A backward that is in its list both whole and split.
    Both {
        /// The list, as in `lists[2]`.
        path: String,
        /// The whole backward.
        action: Action,
    },
    /// An action that the rank does not run: another stage, a microbatch past the last, or an `I` or `W` of a
    /// step that has no times for them.
    Foreign {
        /// The list, as in `lists[2]`.
        path: String,
        /// The rank.
        rank: Rank,
        /// The action.
        action: Action,
    },
    /// A measured action ends before it starts.
    Backwards {
        /// The rank.
        rank: Rank,
        /// The action.
        action: Action,
    },
    /// Two measured actions of one rank overlap.
    Overlap {
        /// The rank.
        rank: Rank,
        /// The one that starts first.
        first: Action,
        /// The one that starts before the first ends.
        second: Action,
    },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { path } => write!(f, "{path}: missing"),
            Self::Unknown { path } => {
                write!(
                    f,
                    "{path}: unknown, the fields are `forward_ns`, `backward_ns`, `transfer_ns`, `input_ns` and `weight_ns`"
                )
            }
            Self::Kind { path, found, expected } => write!(f, "{path}: {found}, expected {expected}"),
            Self::Zero { path, what } => write!(f, "{path}: {}, at least 1 is needed", counted(0, what)),
            Self::Count { path, found, what, other, expected } => {
                write!(f, "{path}: {}, {other} has {expected}", counted(*found, what))
            }
            Self::Fed { path, replicas } => {
                write!(f, "{path} must name LLM replicas in ascending order, below {replicas}")
            }
            Self::TensorParallel { path, degree } => write!(f, "{path}: {degree}, only 1 can be simulated"),
            Self::Colocated { layout } => {
                write!(f, "layout: `{layout}`, colocated components have equal degrees and one stage each")
            }
            Self::Apart { rank } => write!(
                f,
                "lists[{rank}]: not lists[0], ranks that gather layers together run the same actions in the same order"
            ),
            Self::TooMany { actions } => {
                write!(f, "{actions} actions, at most {} can be simulated", u32::MAX)
            }
            Self::NotOnce { path, action, count } => {
                write!(f, "{path}: `{action}` stands {count} times, each action of the rank must stand once")
            }
            Self::Unmeasured { missing, total, rank, action } => write!(
                f,
                "spans: {missing} of {total} actions were not measured, the first is `{action}` of rank {rank}"
            ),
            Self::Uneven { count, what, parts, of } => {
                write!(f, "{what}: {count}, expected a multiple of {parts} ({of})")
            }
            Self::Order { path, order, needs } => write!(f, "{path}: `{order}` needs {needs}"),
            Self::TooLarge { path, held, cap } => write!(f, "{path}: {held}, the rank may hold {cap}"),
            Self::Both { path, action } => {
                write!(f, "{path}: `{action}` stands beside an `I` or `W` of its microbatch")
            }
            Self::Foreign { path, rank, action } => {
                write!(f, "{path}: `{action}` is not an action of rank {rank}")
            }
            Self::Backwards { rank, action } => {
                write!(f, "spans: `{action}` of rank {rank} ends before it starts")
            }
            Self::Overlap { rank, first, second } => {
                write!(f, "spans: `{second}` of rank {rank} starts before `{first}` ends")
            }
        }
    }
}

fn counted(count: usize, what: &str) -> String {
    let plural = match count {
        1 => "",
        _ if what.ends_with("ch") => "es",
        _ => "s",
    };
    format!("{count} {what}{plural}")
}

fn list(violations: &[Violation]) -> String {
    violations.iter().fold(String::new(), |mut text, violation| {
        let _ = write!(text, "\n  {violation}");
        text
    })
}
