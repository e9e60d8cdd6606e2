//! Tests of this module.

use super::*;
use serde_json::json;

fn record(extra: &Value, question: &str) -> Value {
    let mut record = json!({"id": 7, "conversations": [
        {"from": "human", "value": question}, {"from": "gpt", "value": "a cat"}]});
    record.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    record
}

fn parts(extra: &Value, question: &str) -> Result<Vec<TurnPart>, String> {
    Conversation::parse(&record(extra, question)).map(|c| c.turns[0].parts.clone())
}

fn text(text: &str) -> TurnPart {
    TurnPart::Text(text.to_owned())
}

#[test]
fn marks_are_where_media_stand() {
    let several = json!({"image": ["a.png", "b.png"], "video": "c.gif"});
    let conversation = Conversation::parse(&record(&several, "x<image><video>\ny <image>")).unwrap();
    assert_eq!(conversation.id.as_deref(), Some("7"));
    assert_eq!(
        conversation.turns[0].parts,
        [text("x"), TurnPart::Media(0), TurnPart::Media(1), text("\ny "), TurnPart::Media(2)]
    );
    let media: Vec<_> = conversation.media.iter().map(|m| (m.source.clone(), m.kind)).collect();
    let named = |name: &str, kind| (MediaSource::Name(name.to_owned()), kind);
    let (image, video) = (MediaKind::Image, MediaKind::Video);
    assert_eq!(media, [named("a.png", image), named("c.gif", video), named("b.png", image)]);
    assert_eq!(
        conversation.turns[1],
        Turn { role: Role::Assistant, parts: vec![text("a cat")], is_learnt: true, fields: Map::new() }
    );
}

#[test]
fn customs_of_llava_are_kept() {
    let one = [TurnPart::Media(0), text("\nwhat")];
    assert_eq!(parts(&json!({"image": "a.png"}), "what").unwrap(), one);
    assert_eq!(parts(&json!({"video": ["a.mp4"]}), "what").unwrap(), one);
    let video = Conversation::parse(&record(&json!({"video": "a.mp4"}), "<image>\nwhat")).unwrap();
    assert_eq!(video.media[0].kind, MediaKind::Video);
    assert_eq!(video.turns[0].parts, one);
}

#[test]
fn role_and_content_are_read_too() {
    let record = json!({"images": ["a.png"], "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "<image>"}, {"role": "assistant", "content": ""}]});
    let conversation = Conversation::parse(&record).unwrap();
    assert_eq!(
        conversation.turns.iter().map(|t| t.role.name()).collect::<Vec<_>>(),
        ["system", "user", "assistant"]
    );
    assert_eq!(conversation.turns[2].parts, []);
}

#[test]
fn fields_that_are_not_read_are_told() {
    let told = |record: &Value| {
        let (_, unread) = Conversation::parse_whole(record).unwrap();
        let mark = |may_be_media| if may_be_media { "?" } else { "" };
        unread.iter().map(|field| format!("{}{}", field.name, mark(field.may_be_media))).collect::<Vec<_>>()
    };
    let beside = json!({"meta": {"a": 1}, "source": "x", "weight": 2, "url": "https://x/A.JPG?w=1", "none": null,
                        "empty": "", "caption": "unused"});
    let expected = ["meta", "source", "weight", "url?", "caption"];
    assert_eq!(told(&record(&beside, "x")), expected);
    // With a medium, another field's is no more than told.
    let mut with_media = record(&beside, "x");
    with_media["image"] = json!("a.png");
    with_media["image_path"] = json!("b.png");
    assert_eq!(told(&with_media), ["meta", "source", "weight", "url", "caption", "image_path"]);
    let turns = json!({"messages": [
        {"role": "user", "from": "user", "content": [{"type": "text", "text": "x", "index": 3},
            {"type": "image_url", "image_url": {"url": "a.png"}, "max_pixels": 9}], "name": "n"},
        {"role": "assistant", "content": "y", "weight": 1, "name": "m", "loss": true}]});
    let expected = [
        "messages[].role",
        "messages[].name",
        "messages[].content[].index",
        "messages[].content[].max_pixels",
    ];
    assert_eq!(told(&turns), expected);
    assert_eq!(told(&json!({"question": "q", "answer": "a", "text": "t", "choices": []})), ["text"]);
    assert_eq!(told(&json!({"image": "a.png", "text": "t", "id": 3, "system": "s"})), [""; 0]);
}

#[test]
fn media_of_names_we_do_not_know_are_refused() {
    let names = [
        "img",
        "image_path",
        "image_file",
        "image_url",
        "video_path",
        "audio_path",
        "jpg",
        "media",
        "file_name",
        "Image",
    ];
    let long = "QUJD".repeat(100);
    for name in names {
        for value in [
            json!("a/b.jpg"),
            json!(["x.mp4"]),
            json!({"bytes": "AA", "path": null}),
            json!("s3://b/k"),
            json!({"path": "a"}),
            json!(long),
            json!({"attachment": 0}),
        ] {
            let error = Conversation::parse(&record(&json!({name: value}), "what")).unwrap_err();
            assert!(error.starts_with(&format!("`{name}` is ")), "{error}");
            assert!(error.contains("`columns: {"), "{error}");
        }
        for value in [json!(3), json!("none"), json!({}), json!([1, 2]), json!(null)] {
            Conversation::parse(&record(&json!({name: value}), "what")).unwrap();
        }
    }
    let error = |record: &Value| Conversation::parse(record).unwrap_err();
    let in_turn = json!({"conversations": [{"from": "human", "value": "x", "image": "a.png"},
                                           {"from": "gpt", "value": "y"}]});
    let errors = [
        error(&in_turn),
        error(&json!({"video_path": "a.mp4", "question": "<video> what", "answer": "y"})),
        error(&json!({"Image": ["a.png"], "caption": "a cup"})),
        error(&json!({"conversations": [], "messages": [{"role": "user", "content": "x"}]})),
    ];
    insta::assert_snapshot!(errors.join("\n"), @r"
    `conversations[].image` is `a.png`, media under this name are not read: media stand under `image`, `video` or `audio` of the record, or are parts of the content
    `video_path` is `a.mp4`, media under this name are not read: give it our name in the mixture, `columns: {video: video_path}`, or list it under `ignore` there
    `Image` is a list, media under this name are not read: give it our name in the mixture, `columns: {image: Image}`, or list it under `ignore` there
    both `conversations` and `messages` are there
    ");
}

#[test]
fn an_empty_id_is_none() {
    assert_eq!(parse(&json!({"id": "", "question": "x", "answer": "y"})).id, None);
}

#[test]
fn what_is_no_conversation_is_named() {
    let broken = |record: &Value| Conversation::parse(record).unwrap_err();
    let errors = [
        broken(&json!([])),
        broken(&json!({"id": "x"})),
        broken(&json!({"conversations": "hello"})),
        broken(&json!({"conversations": []})),
        broken(&json!({"conversations": [{"from": "robot", "value": "x"}]})),
        broken(&json!({"conversations": [{"value": "x"}]})),
        broken(&json!({"conversations": [{"from": "gpt", "value": 3}]})),
        broken(&json!({"image": "a.png", "conversations": [{"from": "gpt", "value": "x"}]})),
        broken(&record(&json!({"image": [3]}), "x")),
        broken(&record(&json!({"image": ""}), "x")),
        broken(&record(&json!({"image": "A".repeat(4096)}), "x")),
        broken(&record(&json!({"image": "a", "images": ["a"]}), "x")),
        broken(&record(&json!({"videos": [["1.png", "2.png"]]}), "<video>")),
        broken(&record(&json!({"image": ["a", "b"]}), "no marks")),
        broken(&record(&json!({"image": "a"}), "<image><image>")),
        broken(&record(&json!({}), "<image> of nothing")),
        broken(&record(&json!({"video": "a", "image": "b"}), "<image>")),
        broken(&json!({"image": "a", "conversations": [{"from": "gpt", "value": "<image>"}]})),
    ];
    insta::assert_snapshot!(errors.join("\n"), @r"
    it is a list, must be an object
    `conversations` or `messages` is missing: the record has `id`
    `conversations`: text, must be a list of turns
    `conversations` is empty, at least one turn is needed
    `conversations[0].from`: `robot`, must be human, gpt, user, assistant, system or tool
    `conversations[0]`: `from` or `role` is missing
    `conversations[0].value`: a number, must be text
    there is no question to put `<image>` before
    `image`: a number, must be a path or a list of paths
    `image`: a path is empty
    `image`: a text of 4096 bytes is no path, which has at most 4095; base64 needs `data:image/jpeg;base64,` (or another type) before it
    both `image` and `images` are there
    `videos`: a list in place of a video, must be a path or a list of paths; frames as files of their own are not read, make one video of them
    0 `<image>` in the turns, but 2 under `image`: must be as many
    2 `<image>` in the turns, but 1 under `image`: must be as many
    1 `<image>` in the turns, but 0 under `image`: must be as many
    0 `<video>` in the turns, but 1 under `video`: must be as many
    `<image>` stands in an assistant's turn, must stand in a question
    ");
}

fn parse(record: &Value) -> Conversation {
    Conversation::parse(record).unwrap()
}

fn names(conversation: &Conversation) -> Vec<String> {
    let name = |medium: &MediaReference| match &medium.source {
        MediaSource::Name(name) => format!("{} {name}", medium.kind.as_str()),
        MediaSource::Attachment(index) => format!("{} #{index}", medium.kind.as_str()),
        MediaSource::Inline { bytes, field } => {
            format!("{} of {} bytes in {field}", medium.kind.as_str(), bytes.len())
        }
    };
    conversation.media.iter().map(name).collect()
}

#[test]
fn content_may_be_a_list_of_parts() {
    let record = json!({"images": ["next.png"], "messages": [
        {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
        {"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "https://x/a.png"}},
            {"type": "text", "text": "compare"},
            {"type": "image", "image": null},
            {"type": "video", "path": "c.mp4"},
            {"type": "audio", "attachment": 2},
            {"type": "input_audio", "input_audio": "d.wav"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "cup"}]}]});
    let conversation = parse(&record);
    assert_eq!(
        names(&conversation),
        ["image https://x/a.png", "image next.png", "video c.mp4", "audio #2", "audio d.wav"]
    );
    let media = |index| TurnPart::Media(index);
    assert_eq!(
        conversation.turns[1].parts,
        [media(0), text("compare"), media(1), media(2), media(3), media(4)]
    );
    assert_eq!(conversation.turns[2].parts, [text("a cup")]);
}

#[test]
fn questions_and_captions_are_read() {
    let asked = parse(&json!({"images": ["a.png", "b.png"], "query": "what", "response": "cups"}));
    assert_eq!(asked.turns[0].parts, [TurnPart::Media(0), text("\n"), TurnPart::Media(1), text("\nwhat")]);
    assert_eq!(asked.turns[1].parts, [text("cups")]);
    let marked = parse(&json!({"audio": {"path": "a.wav"}, "question": "hear <audio>?", "answer": "yes"}));
    assert_eq!(marked.turns[0].parts, [text("hear "), TurnPart::Media(0), text("?")]);
    let caption = parse(&json!({"image": {"attachment": 0}, "caption": "a cup", "system": "be brief"}));
    assert_eq!(names(&caption), ["image #0"]);
    assert_eq!(
        caption.turns.iter().map(|t| t.role.name()).collect::<Vec<_>>(),
        ["system", "user", "assistant"]
    );
    assert_eq!(caption.turns[1].parts, [TurnPart::Media(0)]);
    let alone = parse(&json!({"question": "1 + 1", "caption": "2"}));
    assert_eq!((alone.media.len(), &alone.turns[1].parts[..]), (0, &[text("2")][..]));
}

/// Who says what, with a mark where a medium stands.
fn said(conversation: &Conversation) -> Vec<String> {
    let part = |part: &TurnPart| match part {
        TurnPart::Text(text) => text.clone(),
        TurnPart::Media(index) => format!("<{index}>"),
    };
    let turn =
        |turn: &Turn| format!("{}: {}", turn.role.name(), turn.parts.iter().map(part).collect::<String>());
    conversation.turns.iter().map(turn).collect()
}

/// As in The Cauldron and `FineVision`: all images stand before the first question.
#[test]
fn lists_of_questions_with_their_answers_are_read() {
    let pair = |user: &str, assistant: &str| json!({"user": user, "assistant": assistant, "source": "vqa"});
    let record = json!({"images": [{"attachment": 0}, {"attachment": 1}], "system": "be brief",
        "texts": [pair("what?", "cups"), pair("how many?", "two")]});
    let (conversation, unread) = Conversation::parse_whole(&record).unwrap();
    assert_eq!(
        said(&conversation),
        ["system: be brief", "user: <0>\n<1>\nwhat?", "assistant: cups", "user: how many?", "assistant: two"]
    );
    assert_eq!(unread.iter().map(|field| field.name.as_str()).collect::<Vec<_>>(), ["texts[].source"]);
    // Text that is written in the picture.
    let (asked, unread) =
        Conversation::parse_whole(&json!({"image": "a.png", "caption": "a sign", "texts": ["STOP"]}))
            .unwrap();
    assert_eq!((said(&asked).len(), unread[0].name.as_str()), (2, "texts"));
    let alone = parse(&json!({"images": [], "texts": [{"user": "1 + 1", "assistant": "2"}]}));
    assert_eq!(said(&alone), ["user: 1 + 1", "assistant: 2"]);
}

/// As in data of Alpaca and ms-swift.
#[test]
fn history_and_input_belong_to_the_question() {
    let record = json!({"instruction": "add", "input": "1 and 1", "output": "2", "images": ["a.png"],
        "system": "be brief", "history": [["hi", "ho"], ["he", "ha"]]});
    let (conversation, unread) = Conversation::parse_whole(&record).unwrap();
    assert_eq!(
        said(&conversation),
        [
            "system: be brief",
            "user: <0>\nhi",
            "assistant: ho",
            "user: he",
            "assistant: ha",
            "user: add\n1 and 1",
            "assistant: 2"
        ]
    );
    assert!(unread.is_empty(), "{unread:?}");
    let plain = parse(&json!({"instruction": "add", "input": "", "output": "2", "history": []}));
    assert_eq!(said(&plain), ["user: add", "assistant: 2"]);
    let alone = parse(&json!({"instruction": "", "input": "1 and 1", "output": "2"}));
    assert_eq!(said(&alone), ["user: 1 and 1", "assistant: 2"]);
}

/// As TRL has them.
#[test]
fn prompts_and_completions_are_read() {
    let texts = parse(&json!({"images": ["a.png", "b.png"], "prompt": "what", "completion": "cups"}));
    assert_eq!(said(&texts), ["user: <0>\n<1>\nwhat", "assistant: cups"]);
    let turns = parse(&json!({"images": ["a.png"],
        "prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what"}],
        "completion": [{"role": "assistant", "content": "cups"}]}));
    assert_eq!(said(&turns), ["system: be brief", "user: <0>\nwhat", "assistant: cups"]);
    // Beside another question it is a field like others.
    let other = json!({"question": "what", "answer": "cups", "prompt": "Answer: {question}"});
    let (asked, unread) = Conversation::parse_whole(&other).unwrap();
    assert_eq!((said(&asked).len(), unread[0].name.as_str()), (2, "prompt"));
    let drawn = parse(&json!({"images": ["a.png"], "prompt": "a cup, oil", "caption": "cups"}));
    assert_eq!(said(&drawn), ["user: <0>", "assistant: cups"]);
    let answered = parse(&json!({"prompt": "what", "response": "cups"}));
    assert_eq!(said(&answered), ["user: what", "assistant: cups"]);
}

/// TRL and ms-swift put them so; a list of LLaVA's form with several images marks each.
#[test]
fn media_of_a_chat_without_marks_stand_before_its_first_question() {
    let chat = json!({"images": ["a.png", "b.png"], "messages": [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "what"},
        {"role": "assistant", "content": "cups"}]});
    assert_eq!(said(&parse(&chat))[1], "user: <0>\n<1>\nwhat");
}

#[test]
fn media_may_stand_in_the_record_itself() {
    let packed = "data:image/png;base64,AAEC";
    let record = json!({"messages": [
        {"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": packed, "detail": "low"}},
            {"type": "input_audio", "input_audio": {"data": "AAECAw==", "format": "wav"}}]},
        {"role": "assistant", "content": "x"}]});
    let place = "messages[0].content";
    assert_eq!(
        names(&parse(&record)),
        [
            format!("image of 3 bytes in {place}[0].image_url.url"),
            format!("audio of 4 bytes in {place}[1].input_audio.data")
        ]
    );
    assert_eq!(
        names(&parse(&json!({"images": [packed, "b.png"], "caption": "x"}))),
        ["image of 3 bytes in images", "image b.png"]
    );
}

/// As `DashScope` has them; a table has null where a part has no such field.
#[test]
fn a_part_without_a_type_is_what_its_field_says() {
    let record = json!({"messages": [
        {"role": "user", "content": [{"image": "a.png"}, {"text": "or", "image": null}, {"image_url": {"url": "b.png"}}]},
        {"role": "assistant", "content": [{"text": "cups"}]}]});
    let (conversation, unread) = Conversation::parse_whole(&record).unwrap();
    assert_eq!(said(&conversation), ["user: <0>or<1>", "assistant: cups"]);
    assert_eq!(names(&conversation), ["image a.png", "image b.png"]);
    assert!(unread.is_empty(), "{unread:?}");
}

/// As OBELICS has them.
#[test]
fn documents_are_read_to_their_end() {
    let record = json!({"images": [null, "a.png", null, null, {"path": "b.png"}],
        "texts": ["one", null, "two", null, null], "metadata": "[]"});
    let (document, unread) = Conversation::parse_whole(&record).unwrap();
    assert!(document.is_document);
    assert_eq!(said(&document), ["assistant: one<0>two<1>"]);
    assert_eq!(names(&document), ["image a.png", "image b.png"]);
    assert_eq!(unread.iter().map(|field| field.name.as_str()).collect::<Vec<_>>(), ["metadata"]);
    let text = parse(&json!({"text": "one two"}));
    assert_eq!((text.is_document, said(&text)), (true, vec!["assistant: one two".to_owned()]));
    // What is written in a picture.
    let caption = parse(&json!({"images": ["a.png"], "texts": ["STOP"], "caption": "a sign"}));
    assert_eq!(
        (caption.is_document, said(&caption)),
        (false, vec!["user: <0>".to_owned(), "assistant: a sign".to_owned()])
    );
}

#[test]
fn documents_whose_lists_do_not_fit_are_refused() {
    let broken = [
        json!({"texts": ["x", null]}),
        json!({"texts": ["x", null], "images": "a.png"}),
        json!({"texts": ["x", null], "images": [null]}),
        json!({"texts": ["x", null], "images": ["a.png", null]}),
        json!({"texts": ["x", null], "images": [null, ""]}),
        json!({"texts": ["", null], "images": [null, "a.png"]}),
        json!({"texts": ["x", null], "images": [null, "a.png"], "video": "b.mp4"}),
        json!({"text": ""}),
        // A caption whose picture is not there.
        json!({"text": "x", "image": null}),
        json!({"text": "x", "img": "a.png"}),
    ];
    let errors: Vec<_> = broken.iter().map(|record| Conversation::parse(record).unwrap_err()).collect();
    insta::assert_snapshot!(errors.join("\n"), @"
    `texts` is a list of text, `images` must be there, as long as it is
    `images`: text, must be a list as long as `texts`
    `images` has 1 places and `texts` 2: a document must have as many of both
    `texts[0]` and `images[0]` are both there, a place of a document must have one of them
    `images[1]`: a path is empty
    `texts` of a document is empty, must have some text
    `video` stands beside `texts` of a document, its media must be under `images`
    `text` of a document is empty, must have some text
    `conversations` or `messages` is missing: the record has `text`, `image`
    `img` is `a.png`, media under this name are not read: give it our name in the mixture, `columns: {image: img}`, or list it under `ignore` there
    ");
}

/// As in data of `OpenAI`, LLaMA-Factory and ms-swift.
#[test]
fn tools_are_read_as_each_trainer_writes_them() {
    let call = json!({"type": "function", "function": {"name": "look", "arguments": {"at": [3, 4.0]}}});
    let tool = json!({"type": "function", "function": {"name": "look", "parameters": {}}});
    let openai = json!({"images": ["a.png"], "tools": [tool], "messages": [
        {"role": "user", "content": "where?"},
        {"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [
            {"type": "function", "function": {"name": "look", "arguments": "{\"at\": [3, 4.0]}"}}]},
        {"role": "tool", "name": "look", "content": [{"type": "text", "text": "here "}, {"type": "image"}]},
        {"role": "assistant", "content": "there"}]});
    let sharegpt = json!({"images": ["a.png"], "tools": "[{\"name\": \"look\", \"parameters\": {}}]", "conversations": [
        {"from": "human", "value": "where?"},
        {"from": "function_call", "value": "{\"name\": \"look\", \"arguments\": {\"at\": [3, 4.0]}}"},
        {"from": "observation", "value": "here <image>"},
        {"from": "gpt", "value": "there"}]});
    for (record, fields) in [
        (openai, json!({"reasoning_content": "hm", "thinking": "hm", "tool_calls": [call]})),
        (sharegpt, json!({"tool_calls": [call]})),
    ] {
        let conversation = parse(&record);
        assert_eq!(
            said(&conversation),
            ["user: where?", "assistant: ", "tool: here <0>", "assistant: there"]
        );
        assert_eq!(json!(conversation.turns[1].fields), fields);
        assert_eq!(conversation.tools, std::slice::from_ref(&tool));
    }
    // Calls belong to the answer before them.
    let swift = parse(&json!({"messages": [
        {"role": "user", "content": "where?"},
        {"role": "assistant", "content": "I look"},
        {"role": "tool_call", "content": "{\"name\": \"look\", \"arguments\": {}}"},
        {"role": "tool_call", "content": "{\"name\": \"zoom\", \"arguments\": {}}"},
        {"role": "tool_response", "content": "here"}]}));
    assert_eq!(said(&swift), ["user: where?", "assistant: I look", "tool: here"]);
    let names = swift.turns[1].fields["tool_calls"].as_array().unwrap().iter().filter_map(tools::name_of);
    assert_eq!(names.collect::<Vec<_>>(), ["look", "zoom"]);
}

#[test]
fn what_stands_beside_calls_is_kept() {
    let messages = |caller: Value| json!({"messages": [{"role": "user", "content": "where?"}, caller]});
    let call = "{\"name\": \"look\", \"parameters\": {\"at\": 1}}";
    let thinks = parse(&messages(json!({"role": "tool_call", "content": call, "reasoning_content": "hm"})));
    assert_eq!(thinks.turns[1].fields["reasoning_content"], "hm");
    assert_eq!(thinks.turns[1].fields["tool_calls"][0]["function"]["arguments"], json!({"at": 1}));
    let within =
        parse(&messages(json!({"from": "function_call", "value": format!("<think>hm</think>{call}")})));
    assert_eq!(said(&within), ["user: where?", "assistant: <think>hm</think>"]);
    // OpenAI's older form, and TRL's prompts.
    let older = parse(&json!({"functions": [{"name": "look"}], "prompt": [
        {"role": "user", "content": "where?"}, {"role": "assistant", "content": null, "function_call": {"name": "look", "arguments": "{}"}},
        {"role": "function", "name": "look", "content": null}],
        "completion": [{"role": "assistant", "content": "there"}]}));
    assert_eq!(older.tools.len(), 1);
    assert_eq!(
        older.turns.iter().map(|turn| turn.is_learnt).collect::<Vec<_>>(),
        [false, false, false, true]
    );
}
