//! The lines to add to a trainer: those of docs/integrations.md, with this dataset and these sizes.

use clap::ValueEnum;
use dflop_schedule::Meets;
use dflop_types::Trained;
use serde_json::json;
use std::fmt;

/// A trainer that the lines are written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Trainer {
    /// A loop of your own with DDP
    Ddp,
    /// A loop of your own with FSDP2
    Fsdp2,
    /// The Trainer of transformers
    Transformers,
    /// The trainer of TRL
    Trl,
    /// A loop with accelerate
    Accelerate,
    /// Lightning
    Lightning,
    /// ms-swift
    #[value(alias = "ms-swift")]
    Swift,
    /// LLaMA-Factory
    #[value(name = "llamafactory", alias = "llama-factory")]
    LlamaFactory,
    /// Axolotl
    Axolotl,
    /// Automodel of NVIDIA
    #[value(alias = "automodel", help = "NVIDIA NeMo Automodel")]
    Nemo,
}

impl fmt::Display for Trainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_possible_value().map_or(Ok(()), |value| f.write_str(value.get_name()))
    }
}

impl Trainer {
    /// What its ranks wait for, by default.
    pub(crate) const fn meets(self) -> Meets {
        if matches!(self, Self::Fsdp2 | Self::Nemo) { Meets::Phase } else { Meets::Step }
    }

    /// Whether it is told of the lines by options, counts costs itself, and pads rows unless it is told not to.
    pub(crate) const fn is_framework(self) -> bool {
        matches!(self, Self::Swift | Self::LlamaFactory | Self::Axolotl | Self::Nemo)
    }

    /// The page that says more.
    pub(crate) const fn page(self) -> &'static str {
        if self.is_framework() { "docs/frameworks.md" } else { "docs/integrations.md" }
    }
}

/// What the lines say.
#[derive(Debug, Clone)]
pub(crate) struct Code {
    pub(crate) trainer: Trainer,
    /// Arguments of `dflop.costs`.
    pub(crate) costs: Vec<String>,
    pub(crate) batch_size: u32,
    pub(crate) accumulation: u32,
    pub(crate) meets: Meets,
    /// Whether the collation pads, and batches are to know it.
    pub(crate) is_padded: bool,
    /// Whether the encoder is shared out, too.
    pub(crate) has_second_line: bool,
    /// Whether rows are padded, and the layers of the LLM are to compute no padding.
    pub(crate) removes_padding: bool,
    pub(crate) num_ranks: u32,
    /// What trains.
    pub(crate) trained: Trained,
}

/// A text as a Python literal.
pub(crate) fn quoted(text: &str) -> String {
    json!(text).to_string()
}

/// Letters of a line, after which its arguments go to the next.
const LINE_MAX: usize = 94;

/// A call that is too long, with its arguments on lines of their own; a line ends only before an argument that has a name.
fn broken(line: &str) -> Vec<String> {
    let Some((call, arguments)) = line.split_once('(').filter(|_| line.chars().count() > LINE_MAX) else {
        return vec![line.to_owned()];
    };
    let is_letter = |letter: char| letter == '_' || letter.is_ascii_lowercase();
    let has_name = |part: &str| part.split_once('=').is_some_and(|(name, _)| name.chars().all(is_letter));
    let (mut lines, mut last) = (vec![format!("{call}(")], String::new());
    for part in arguments.split_inclusive(", ") {
        if has_name(part) && last.chars().count() + part.chars().count() > LINE_MAX - 4 {
            lines.push(format!("    {}", last.trim_end()));
            last.clear();
        }
        last.push_str(part);
    }
    lines.push(format!("    {last}"));
    lines
}

impl Code {
    /// Six to eight lines; with the second line two more, as under FSDP2 without it, with the third one, or two where it comes
    /// alone, and one more where a call is long. Of a framework its options, three to eleven lines.
    pub(crate) fn lines(&self) -> Vec<String> {
        if self.trainer.is_framework() {
            return self.options();
        }
        let mut lines = vec!["import dflop".to_owned()];
        let has_text_alone = self.trainer == Trainer::Fsdp2 && !self.has_second_line;
        let of_model = [
            (has_text_alone, "attend_encoder"),
            (self.has_second_line, "balance_encoder"),
            (self.removes_padding, "remove_padding"),
        ];
        let of_model: Vec<&str> =
            of_model.into_iter().filter_map(|(has, name)| has.then_some(name)).collect();
        if !of_model.is_empty() {
            lines.push(format!("from dflop.integrations import {}", of_model.join(", ")));
        }
        lines.extend(self.imports().iter().map(|line| (*line).to_owned()));
        let alone = if self.has_second_line { ".llm_alone()" } else { "" };
        lines.push(format!("costs = dflop.costs({}){alone}", self.costs.join(", ")));
        let model = if self.trainer == Trainer::Lightning { "self.model" } else { "model" };
        if self.has_second_line {
            let place = match self.trainer {
                Trainer::Ddp | Trainer::Accelerate => "  # the model inside DDP",
                Trainer::Fsdp2 => "  # before or after fully_shard",
                Trainer::Lightning => "  # in on_fit_start",
                _ => "",
            };
            lines.push(format!("balance_encoder({model}){place}"));
        }
        if has_text_alone {
            lines.push(
                "attend_encoder(model)  # text alone hangs no rank; before or after fully_shard".to_owned(),
            );
        }
        if self.removes_padding {
            let place = if self.trainer == Trainer::Lightning { "  # in on_fit_start" } else { "" };
            lines.push(format!("remove_padding({model}){place}"));
        }
        lines.extend(self.body());
        lines.iter().flat_map(|line| broken(line)).collect()
    }

    /// Whether ranks meet in each microbatch, in which the work must be even: with the encoder shared out they do.
    pub(super) fn is_phase(&self) -> bool {
        self.meets == Meets::Phase || (self.has_second_line && self.accumulation > 1)
    }

    const fn imports(&self) -> &'static [&'static str] {
        const LOSS: &str = "from dflop.integrations import num_label_tokens, token_loss";
        match self.trainer {
            Trainer::Ddp | Trainer::Fsdp2 => {
                &["from dflop.integrations import balanced_loader, num_label_tokens, token_loss"]
            }
            Trainer::Transformers | Trainer::Trl => &["from dflop.integrations.transformers import balance"],
            Trainer::Accelerate => &[LOSS, "from dflop.integrations.accelerate import balanced"],
            Trainer::Lightning => &["from dflop.integrations.lightning import BalancedData"],
            Trainer::Swift | Trainer::LlamaFactory | Trainer::Axolotl | Trainer::Nemo => &[],
        }
    }

    /// Where the batches come from, and the loss.
    fn body(&self) -> Vec<String> {
        let meets = if self.is_phase() { ", meets=\"phase\"" } else { "" };
        let is_padded = self.is_padded && !self.removes_padding;
        let meets = format!("{meets}{}", if is_padded { ", is_padded=True" } else { "" });
        let size = format!("batch_size={}", self.batch_size);
        match self.trainer {
            Trainer::Ddp | Trainer::Fsdp2 => {
                let (accumulation, labels) = if self.accumulation > 1 {
                    let labels = "[m[\"labels\"] for m in microbatches])  # of the step, on all ranks";
                    (format!(", accumulation={}", self.accumulation), labels)
                } else {
                    (String::new(), "batch[\"labels\"])  # of the step, on all ranks")
                };
                let labels_of = if self.accumulation > 1 { "m" } else { "batch" };
                vec![
                    format!(
                        "loader = balanced_loader(data, costs, {size}{accumulation}{meets}, collate_fn=collate)"
                    ),
                    "loader.batch_sampler.set_epoch(epoch)  # before each epoch".to_owned(),
                    format!("tokens = num_label_tokens({labels}"),
                    format!("loss = token_loss(logits, {labels_of}[\"labels\"], tokens, num_ranks)"),
                ]
            }
            Trainer::Transformers | Trainer::Trl => {
                let trainer = if self.trainer == Trainer::Trl {
                    "trainer = SFTTrainer(model, args=arguments, train_dataset=data)  # without packing"
                } else {
                    "trainer = Trainer(model, arguments, data_collator=collate, train_dataset=data)"
                };
                vec![
                    trainer.to_owned(),
                    format!("balance(trainer, costs{meets})"),
                    "trainer.train()".to_owned(),
                ]
            }
            Trainer::Accelerate => vec![
                format!("loader = balanced(accelerator, data, costs, {size}{meets}, collate_fn=collate)"),
                "tokens = num_label_tokens([m[\"labels\"] for m in microbatches])  # of the step".to_owned(),
                "loss = token_loss(logits, m[\"labels\"], tokens, accelerator.num_processes)".to_owned(),
                "accelerator.backward(loss * accelerator.gradient_accumulation_steps)".to_owned(),
            ],
            Trainer::Lightning => vec![
                "trainer = pl.Trainer(use_distributed_sampler=False)  # and what you have".to_owned(),
                format!("trainer.fit(module, BalancedData(data, costs, {size}{meets}, collate_fn=collate))"),
                "# In training_step, which returns it:".to_owned(),
                "loss = self.trainer.datamodule.token_loss(logits, batch[\"labels\"], batch_idx)".to_owned(),
            ],
            Trainer::Swift | Trainer::LlamaFactory | Trainer::Axolotl | Trainer::Nemo => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn code(trainer: Trainer, has_second_line: bool) -> Code {
        let costs = vec![quoted("data_profile.parquet")];
        Code {
            trainer,
            costs,
            batch_size: 4,
            accumulation: 1,
            meets: trainer.meets(),
            is_padded: false,
            has_second_line,
            removes_padding: false,
            num_ranks: 2,
            trained: Trained::default(),
        }
    }

    /// Trainers that are told of the lines in Python.
    fn of_loops() -> impl Iterator<Item = Trainer> {
        Trainer::value_variants().iter().copied().filter(|trainer| !trainer.is_framework())
    }

    /// The page shows what the command prints: the first line for each trainer, both for one where ranks meet in phases.
    #[test]
    fn the_lines_are_those_of_the_page() {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/integrations.md");
        let page = std::fs::read_to_string(page).unwrap();
        let shown = |code: &Code| page.contains(&format!("```python\n{}\n```\n", code.lines().join("\n")));
        for trainer in of_loops() {
            let first = code(trainer, false);
            assert!(shown(&first), "not in docs/integrations.md:\n{}", first.lines().join("\n"));
            // Of both lines, what is new.
            let both = code(trainer, true).lines();
            let new: Vec<&String> = both.iter().filter(|line| !first.lines().contains(line)).collect();
            assert!((2..=3).contains(&new.len()), "{new:?}");
            for line in new {
                assert!(page.contains(line.as_str()), "not in docs/integrations.md: {line}");
            }
            // And of the third line, wherever it stands.
            let removed = Code { is_padded: true, removes_padding: true, ..code(trainer, true) }.lines();
            let new: Vec<&String> = removed.iter().filter(|line| !both.contains(line)).collect();
            assert_eq!(new.len(), 2, "{new:?}");
            assert_eq!(new[0], "from dflop.integrations import balance_encoder, remove_padding");
            assert!(page.contains(new[1].as_str()), "not in docs/integrations.md: {new:?}");
            assert!(!removed.join("\n").contains("is_padded"), "{removed:?}");
        }
        assert!(shown(&code(Trainer::Fsdp2, true)), "{}", code(Trainer::Fsdp2, true).lines().join("\n"));
    }

    #[test]
    fn six_to_eight_lines_of_a_screen() {
        for trainer in of_loops() {
            let of_text_alone = if trainer == Trainer::Fsdp2 { 2 } else { 0 };
            for (has_second_line, most) in [(false, 8 + of_text_alone), (true, 11)] {
                let lines = Code { accumulation: 16, ..code(trainer, has_second_line) }.lines();
                assert!((5..=most).contains(&lines.len()), "{lines:?}");
                assert!(lines.iter().all(|line| line.len() <= LINE_MAX), "{lines:?}");
            }
        }
    }

    #[test]
    fn padded_rows_are_told_to_the_first_line() {
        for trainer in of_loops() {
            let lines =
                Code { is_padded: true, meets: Meets::Phase, accumulation: 16, ..code(trainer, true) }
                    .lines();
            assert!(lines.join("\n").contains(", is_padded=True"), "{lines:?}");
            assert!(lines.iter().all(|line| line.len() <= LINE_MAX), "{lines:?}");
        }
    }

    #[test]
    fn sizes_and_layouts_are_the_users() {
        let accumulated =
            Code { accumulation: 2, batch_size: 3, ..code(Trainer::Ddp, true) }.lines().join("\n");
        assert!(accumulated.contains("batch_size=3, accumulation=2, meets=\"phase\""), "{accumulated}");
        assert!(accumulated.contains("[m[\"labels\"] for m in microbatches]"), "{accumulated}");
        let phase = Code { meets: Meets::Phase, ..code(Trainer::Transformers, false) }.lines().join("\n");
        assert!(phase.contains("balance(trainer, costs, meets=\"phase\")"), "{phase}");
        let long = vec![
            quoted("a_directory_with_a_long_name/data_profile.parquet"),
            "model=\"qwen2.5-vl-72b\"".to_owned(),
        ];
        let long = Code { costs: long, ..code(Trainer::Fsdp2, true) }.lines();
        assert_eq!(
            long[3..5],
            [
                "costs = dflop.costs(",
                "    \"a_directory_with_a_long_name/data_profile.parquet\", model=\"qwen2.5-vl-72b\").llm_alone()"
            ]
        );
        assert_eq!(quoted("a\"b\\c"), r#""a\"b\\c""#);
    }
}
