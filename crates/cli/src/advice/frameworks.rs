//! What a fine-tuning framework is told: the options of docs/frameworks.md, in its own YAML or command.

use super::code::{Code, Trainer};

/// Ranks of a node, where torchrun is asked for more.
const NODE_RANKS: u32 = 8;

impl Code {
    /// The options, each with its value in YAML. `is_padded` is none of them: the framework knows whether it pads.
    fn asked(&self) -> Vec<(&'static str, &'static str)> {
        let all = [
            (self.has_second_line, "balance_encoder", "true"),
            (self.removes_padding, "remove_padding", "true"),
            // Automodel's recipe decides it by the strategy of its ranks.
            (self.is_phase() && self.trainer != Trainer::Nemo, "meets", "phase"),
        ];
        all.into_iter().filter_map(|(is_asked, name, value)| is_asked.then_some((name, value))).collect()
    }

    /// What stands under `dflop:` in YAML; nothing where nothing is asked for.
    fn section(&self) -> Vec<String> {
        let asked = self.asked();
        let options = asked.iter().map(|(name, value)| format!("  {name}: {value}"));
        let title = (!asked.is_empty()).then(|| "dflop:".to_owned());
        title.into_iter().chain(options).collect()
    }

    /// The lines for a framework. Costs and sizes are not in them: it counts its own rows, and its batch size is in what the
    /// user has.
    pub(super) fn options(&self) -> Vec<String> {
        let is_flat = !self.is_padded;
        match self.trainer {
            Trainer::Swift => {
                let value = |value| if value == "true" { "True".to_owned() } else { format!("\"{value}\"") };
                let asked: Vec<String> =
                    self.asked().iter().map(|(name, asked)| format!("{name}={}", value(*asked))).collect();
                vec![
                    "# plugin.py".to_owned(),
                    "from dflop.integrations.swift import register".to_owned(),
                    format!("register({})", asked.join(", ")),
                    "# The command, and what you have".to_owned(),
                    format!(
                        "swift sft --external_plugins plugin.py --callbacks dflop{}",
                        if is_flat { " --padding_free true" } else { "" }
                    ),
                ]
            }
            Trainer::LlamaFactory => {
                let mut lines = self.section();
                if self.has_second_line && self.trained.encoder {
                    lines.push("use_reentrant_gc: false  # with a trained encoder".to_owned());
                }
                if !lines.is_empty() {
                    lines.insert(0, "# In train.yaml, beside what you have".to_owned());
                }
                lines.push("# In place of llamafactory-cli train train.yaml".to_owned());
                let ranks = self.num_ranks.min(NODE_RANKS);
                let nodes = if self.num_ranks > NODE_RANKS { "  # on each node" } else { "" };
                lines.push(format!(
                    "torchrun --nproc-per-node {ranks} -m dflop.integrations.llamafactory train.yaml{nodes}"
                ));
                lines
            }
            Trainer::Nemo => {
                let mut lines = vec![
                    "# In your YAML, in place of recipe: FinetuneRecipeForVLM".to_owned(),
                    "recipe: dflop.integrations.nemo.recipe.BalancedRecipeForVLM".to_owned(),
                ];
                lines.extend(self.section());
                lines
            }
            _ => {
                let mut lines = vec!["# In your YAML, beside what you have".to_owned()];
                lines.push("plugins:".to_owned());
                lines.push("  - dflop.integrations.axolotl.BalancePlugin".to_owned());
                lines.extend(self.section());
                if is_flat {
                    lines.push("batch_flattening: true".to_owned());
                }
                lines
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;
    use dflop_schedule::Meets;
    use dflop_types::Trained;

    fn frameworks() -> impl Iterator<Item = Trainer> {
        Trainer::value_variants().iter().copied().filter(|trainer| trainer.is_framework())
    }

    fn code(trainer: Trainer) -> Code {
        Code {
            trainer,
            costs: vec!["\"data_profile.parquet\"".to_owned()],
            batch_size: 4,
            accumulation: 1,
            meets: Meets::Step,
            is_padded: true,
            has_second_line: false,
            removes_padding: false,
            num_ranks: 8,
            trained: Trained::default(),
        }
    }

    /// The page has each line that the command prints, but for its comments.
    #[test]
    fn the_lines_are_those_of_the_page() {
        let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/frameworks.md");
        let page = std::fs::read_to_string(page).unwrap();
        for trainer in frameworks() {
            for (has_second_line, removes_padding) in
                [(false, false), (false, true), (true, false), (true, true)]
            {
                let lines = Code { has_second_line, removes_padding, ..code(trainer) }.lines();
                assert!((2..=7).contains(&lines.len()), "{lines:?}");
                for line in lines.iter().filter(|line| !line.starts_with('#')) {
                    let said = line.split("  #").next().unwrap_or(line);
                    assert!(page.contains(said), "not in docs/frameworks.md: {said}");
                }
                let lines = lines.join("\n");
                assert_eq!(lines.contains("balance_encoder"), has_second_line, "{lines}");
                assert_eq!(lines.contains("remove_padding"), removes_padding, "{lines}");
            }
        }
    }

    #[test]
    fn options_are_those_of_the_simulation() {
        for trainer in frameworks() {
            // Ranks that share the encoder's work meet in each microbatch.
            let lines = Code { has_second_line: true, accumulation: 2, ..code(trainer) }.lines().join("\n");
            let phase = if trainer == Trainer::Swift { "meets=\"phase\"" } else { "\n  meets: phase" };
            assert_eq!(lines.contains(phase), trainer != Trainer::Nemo, "{lines}");
            assert!(!code(trainer).lines().join("\n").contains("meets"));
        }
        let flat = |trainer| Code { is_padded: false, ..code(trainer) }.lines().join("\n");
        assert!(flat(Trainer::Swift).ends_with("dflop --padding_free true"));
        assert!(flat(Trainer::Axolotl).ends_with("batch_flattening: true"));
        let factory = |encoder| {
            let trained = Trained { encoder, ..Trained::default() };
            Code { has_second_line: true, trained, ..code(Trainer::LlamaFactory) }
        };
        assert!(factory(true).lines().join("\n").contains("use_reentrant_gc: false"));
        assert!(!factory(false).lines().join("\n").contains("use_reentrant_gc"));
        let many = Code { num_ranks: 64, ..code(Trainer::LlamaFactory) }.lines();
        assert!(many[1].contains("--nproc-per-node 8") && many[1].ends_with("# on each node"), "{many:?}");
    }
}
