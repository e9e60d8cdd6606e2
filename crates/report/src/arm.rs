//! The names of the arms of a comparison, and their colours.

/// The name of an arm, with what it does in words.
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

/// The CSS class that gives an arm its colour.
pub(crate) fn arm_class(arm: &str) -> &'static str {
    match arm {
        "aware" | "aware-ahead" => "a-aware",
        "blind" | "blind-ahead" | "tokens" | "tokens-ahead" => "a-blind",
        _ => "a-other",
    }
}
