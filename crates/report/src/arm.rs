//! What the arms of a comparison are called, and how they are coloured.

/// An arm and what it does.
pub(crate) fn arm_name(arm: &str) -> &str {
    match arm {
        "blind" => "blind: samples in arrival order",
        "blind-ahead" => "blind-ahead: samples in arrival order, forwards run ahead",
        "tokens" => "tokens: balanced by LLM tokens",
        "tokens-ahead" => "tokens-ahead: balanced by LLM tokens, forwards run ahead",
        "aware" => "aware: scheduled by dflop",
        "aware-ahead" => "aware-ahead: scheduled by dflop, forwards run ahead",
        "" => "Step",
        other => other,
    }
}

/// The class of an arm's colour.
pub(crate) fn arm_class(arm: &str) -> &'static str {
    match arm {
        "aware" | "aware-ahead" => "a-aware",
        "blind" | "blind-ahead" | "tokens" | "tokens-ahead" => "a-blind",
        _ => "a-other",
    }
}
