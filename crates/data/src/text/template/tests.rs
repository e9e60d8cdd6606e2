//! Tests of this module.

use super::*;
use serde_json::json;

const CHATML: &str =
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}";

fn open(source: &str) -> ChatTemplate {
    let placeholders = [Some("<image>".to_owned()), None, None];
    ChatTemplate::new(source, &[("bos_token".to_owned(), "<s>".to_owned())], placeholders).unwrap()
}

fn refused(source: &str) -> String {
    ChatTemplate::new(source, &[], [None, None, None]).unwrap_err()
}

fn conversation(turns: &[(&str, &str)]) -> Conversation {
    let images = turns.iter().map(|(_, text)| text.matches("<image>").count()).sum();
    let turns: Vec<_> = turns.iter().map(|(role, text)| json!({"from": role, "value": text})).collect();
    let images = vec!["a.png"; images];
    Conversation::parse(&json!({"images": images, "conversations": turns})).unwrap()
}

fn answers(source: &str, turns: &[(&str, &str)]) -> (String, Vec<String>) {
    let rendered = open(source).render(&conversation(turns)).unwrap();
    let answers = rendered.answers.iter().map(|span| rendered.text[span.clone()].to_owned()).collect();
    (rendered.text, answers)
}

const TALK: [(&str, &str); 4] =
    [("human", "<image>\nwhat?"), ("gpt", " a cup \n"), ("human", "red?"), ("gpt", "")];

#[test]
fn a_template_of_texts_gets_placeholders_in_the_text() {
    let (text, answers) = answers(CHATML, &TALK);
    assert_eq!(
        text,
        "<|im_start|>user\n<image>\nwhat?<|im_end|>\n<|im_start|>assistant\n a cup \n<|im_end|>\n\
         <|im_start|>user\nred?<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
    );
    assert_eq!(answers, [" a cup \n", ""]);
}

#[test]
fn a_template_of_lists_gets_lists() {
    let lists = "{{ bos_token }}{% for m in messages %}{{ m.role.upper() }}: {% for p in m.content %}\
        {% if p.type == 'image' %}[<image>]{% else %}{{ p.text }}{% endif %}{% endfor %}</s>{% endfor %}";
    let (text, answers) = answers(lists, &TALK);
    assert_eq!(text, "<s>USER: [<image>]\nwhat?</s>ASSISTANT:  a cup \n</s>USER: red?</s>ASSISTANT: </s>");
    assert_eq!(answers, [" a cup \n", ""]);
    // Pixtral's way: lists from the user alone.
    let mixed = "{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}\
        {% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}\
        {% else %}{{ '[' + m.content + ']' }}{% endif %}{% endfor %}";
    let (text, _) = self::answers(mixed, &[("system", "be calm"), TALK[0], TALK[1]]);
    assert_eq!(text, "[be calm]<image>\nwhat?[ a cup \n]");
}

#[test]
fn a_template_that_trims_is_followed() {
    let trims = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}\
        {% if add_generation_prompt %}<|assistant|>{% endif %}";
    let (text, answers) = answers(trims, &TALK);
    assert_eq!(
        text,
        "<|user|><image>\nwhat?<|end|><|assistant|>a cup<|end|><|user|>red?<|end|><|assistant|><|end|>"
    );
    assert_eq!(answers, ["a cup", ""]);
}

/// Mistral 7B 0.3: answers are trimmed, and the system's words go into the last question, so that no rendering of fewer
/// turns is a beginning of the whole.
#[test]
fn a_template_that_trims_and_moves_turns_is_followed() {
    let moves = "{% set system = messages[0].content if messages[0].role == 'system' else '' %}\
        {% for m in messages %}{% if m.role == 'user' %}[{% if loop.last %}{{ system }}{% endif %}{{ m.content }}]\
        {% elif m.role == 'assistant' %} {{ m.content | trim }}</s>{% endif %}{% endfor %}";
    let turns = [("system", "calm"), ("human", "a"), ("gpt", " b \n"), ("human", "c"), ("gpt", "  ")];
    let (text, answers) = answers(moves, &[&turns[..], &[("human", "d")]].concat());
    assert_eq!(text, "[a] b</s>[c] </s>[calmd]");
    assert_eq!(answers, ["b", ""]);
}

#[test]
fn an_answer_that_is_rewritten_is_refused() {
    let shouts = "{% for m in messages %}{% if m.role == 'assistant' and m.content.startswith('a') %}\
        {{ m.content.upper() }}{% else %}{{ m.content }}{% endif %}|{% endfor %}";
    let template = open(&shouts.replace("startswith('a')", "startswith('b')"));
    assert_eq!(template.render(&conversation(&[("human", "x"), ("gpt", "a")])).unwrap().answers[0], 2..3);
    let error = template.render(&conversation(&[("human", "x"), ("gpt", "b")])).unwrap_err();
    assert!(
        error.starts_with("the answer of turn 1 is not found in what the chat template writes"),
        "{error}"
    );
}

#[test]
fn generation_tags_are_the_answers() {
    let tags = "{% for m in messages %}\n  {%- if m.role == 'assistant' %}\n    {% generation %}\n{{ m.content }}|\
        {%- endgeneration %}\n  {%- else %}{# {% generation %} #}{{ m.content }}{{ '{% generation %}' }}\
        {% endif %}\n{% endfor %}";
    let (text, answers) = answers(tags, &TALK[1..3]);
    assert_eq!(text, " a cup \n|red?{% generation %}");
    assert_eq!(answers, [" a cup \n|"]);
}

#[test]
fn what_a_template_may_not_is_named() {
    assert!(refused("{% for %}").starts_with("the chat template does not parse: line 1: "));
    assert!(refused("{{ messages[0].content[0] }}").contains("writes 0 of 2 turns"));
    assert!(refused("{{ strftime_now('%d') }}").contains("it asks for the date"));
    assert!(refused("{{ raise_exception('no talk') }}").ends_with("the chat template: line 1: no talk"));
    assert!(refused("{{ 1|tojson(indent=65) }}").ends_with("an indent of 65, must be at most 64"));
    let alternates = format!(
        "{{% if messages[0].role == 'assistant' %}}{{{{ raise_exception('ask') }}}}{{% endif %}}{CHATML}"
    );
    let error = open(&alternates).render(&conversation(&[("gpt", "x")])).unwrap_err();
    assert_eq!(error, "the chat template: line 1: ask");
    let video = json!({"video": "a.mp4", "conversations": [{"from": "human", "value": "<video>"}]});
    let error = open(CHATML).render(&Conversation::parse(&video).unwrap()).unwrap_err();
    assert_eq!(error, "the model's family reads no video");
    let reserved = conversation(&[("gpt", "a\u{fdd1}b")]);
    assert_eq!(
        open(CHATML).render(&reserved).unwrap_err(),
        "a turn holds the character U+FDD0 or U+FDD1, must not"
    );
}

/// Python 3.11, e with an acute: `json.dumps({"b": "<e>\n", "a": [1, True, None, {}]}, ensure_ascii=False)`, and so on.
#[test]
fn json_is_that_of_python() {
    let json = |call: &str| {
        let source = format!("{{{{ {{'b': '<\u{e9}>\\n', 'a': [1, true, none, {{}}]}} | {call} }}}}{CHATML}");
        let text = open(&source).render(&conversation(&[("human", "x")])).unwrap().text;
        text.split("<|im_start|>").next().unwrap().to_owned()
    };
    assert_eq!(json("tojson"), "{\"b\": \"<\u{e9}>\\n\", \"a\": [1, true, null, {}]}");
    assert_eq!(
        json("tojson(ensure_ascii=true, sort_keys=true)"),
        r#"{"a": [1, true, null, {}], "b": "<\u00e9>\n"}"#
    );
    assert_eq!(
        json("tojson(indent=2)"),
        "{\n  \"b\": \"<\u{e9}>\\n\",\n  \"a\": [\n    1,\n    true,\n    null,\n    {}\n  ]\n}"
    );
}
