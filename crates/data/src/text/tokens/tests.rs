use super::*;
use proptest::prelude::*;
use serde_json::json;

/// The demo's tokenizer; `config` changes its `config.json`.
fn open(change: impl FnOnce(&mut Value)) -> Result<ChatTokenizer, DataError> {
    let dir = tempfile::tempdir().unwrap();
    crate::demo::write_model(dir.path()).unwrap();
    let files = ModelFiles::read(dir.path()).unwrap();
    let mut config = files.family_files().unwrap().config;
    change(&mut config);
    ChatTokenizer::open(&files, &config, files.family().unwrap().as_ref())
}

fn tokenizer() -> &'static ChatTokenizer {
    static TOKENIZER: std::sync::LazyLock<ChatTokenizer> = std::sync::LazyLock::new(|| open(|_| {}).unwrap());
    &TOKENIZER
}

fn features(n: u32) -> MediaShape {
    MediaShape {
        num_tiles: 1,
        segments: vec![],
        pieces: vec![Piece::Features(n)],
        frame_indices: vec![],
        parts: vec![],
        patches: None,
        first_patches: None,
        last_patches: None,
    }
}

fn conversation(turns: &[(&str, &str)], images: usize) -> Conversation {
    let turns: Vec<_> = turns.iter().map(|(role, text)| json!({"from": role, "value": text})).collect();
    let images: Vec<_> = (0..images).map(|n| format!("{n}.png")).collect();
    Conversation::parse(&json!({"image": images, "conversations": turns})).unwrap()
}

#[test]
fn tokens_are_those_of_the_whole_text() {
    let tokenizer = tokenizer();
    let sample =
        conversation(&[("system", "be calm"), ("human", "<image>\nwhat is it?"), ("gpt", "A red cup.")], 1);
    let tokens = tokenizer.tokenize(&sample, &[&features(3)]).unwrap().expand();
    let text = "<|im_start|>system\nbe calm<|im_end|>\n<|im_start|>user\n<image><image><image>\nwhat is it?\
                <|im_end|>\n<|im_start|>assistant\nA red cup.<|im_end|>\n";
    assert_eq!(tokens.input_ids, tokenizer.opened.tokenizer.encode(text, false).unwrap().get_ids());
    let features: Vec<_> =
        tokens.input_ids.iter().zip(&tokens.feature_mask).filter(|(_, m)| **m).map(|(id, _)| *id).collect();
    assert_eq!(features, [3, 3, 3]);
}

/// As ms-swift, `OpenAI` and Axolotl write it; of a question it says nothing.
#[test]
fn an_answer_may_carry_no_loss() {
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    for (name, off) in [("loss", json!(false)), ("weight", json!(0)), ("train", json!(0.0))] {
        let mut turns =
            [turn("user", "a"), turn("assistant", "red"), turn("user", "b"), turn("assistant", "blue")];
        turns[0][name] = off.clone();
        let all =
            tokenizer().tokenize(&Conversation::parse(&json!({"messages": turns})).unwrap(), &[]).unwrap();
        turns[1][name] = off;
        let one =
            tokenizer().tokenize(&Conversation::parse(&json!({"messages": turns})).unwrap(), &[]).unwrap();
        let (all, one) = (all.expand(), one.expand());
        assert_eq!(all.input_ids, one.input_ids);
        let learnt = |tokens: &Tokens| {
            let labels = tokens.labels.iter().filter_map(|label| u32::try_from(*label).ok());
            tokenizer().opened.tokenizer.decode(&labels.collect::<Vec<_>>(), false).unwrap()
        };
        assert_eq!([learnt(&all), learnt(&one)], ["red<|im_end|>blue<|im_end|>", "blue<|im_end|>"], "{name}");
    }
}

#[test]
fn labels_are_the_answers_and_their_ends() {
    let tokenizer = tokenizer();
    let sample = conversation(&[("human", "what"), ("gpt", "A cup."), ("human", "where"), ("gpt", "")], 0);
    let tokens = tokenizer.tokenize(&sample, &[]).unwrap().expand();
    let labelled: Vec<u32> =
        tokens.labels.iter().filter(|&&l| l != NO_LABEL).map(|&l| u32::try_from(l).unwrap()).collect();
    assert_eq!(tokenizer.opened.tokenizer.decode(&labelled, false).unwrap(), "A cup.<|im_end|><|im_end|>");
    assert!(tokens.labels.iter().zip(&tokens.input_ids).all(|(&l, &id)| l == NO_LABEL || l == i64::from(id)));
    assert_eq!(tokens.label_tokens() as usize, labelled.len());
}

/// All texts carry loss, and the end; no template writes anything around them.
#[test]
fn a_document_is_its_texts_and_media_to_the_end() {
    let tokenizer = tokenizer();
    let document = json!({"texts": ["A cup.", null, " Two cups."], "images": [null, "a.png", null]});
    let document = Conversation::parse(&document).unwrap();
    let tokens = tokenizer.tokenize(&document, &[&features(2)]).unwrap();
    let laid_out = tokens.expand();
    let decoded = |ids: &[u32]| tokenizer.opened.tokenizer.decode(ids, false).unwrap();
    assert_eq!(decoded(&laid_out.input_ids), "A cup.<image><image> Two cups.<|im_end|>");
    let labelled: Vec<u32> =
        laid_out.labels.iter().filter(|&&l| l != NO_LABEL).map(|&l| u32::try_from(l).unwrap()).collect();
    let first = decoded(&laid_out.input_ids[..1]);
    assert_eq!(
        format!("{first}{}", decoded(&labelled)),
        "A cup. Two cups.<|im_end|>",
        "the first is predicted from nothing"
    );
    assert_eq!(tokens.count(), Some((laid_out.input_ids.len() as u32, laid_out.label_tokens())));
    assert_eq!(laid_out.label_tokens(), labelled.len() as u32);
}

#[test]
fn a_tokenizer_of_another_model_is_refused() {
    let error = |change: fn(&mut Value)| open(change).unwrap_err().to_string();
    let with_id = |config: &mut Value| config["image_token_index"] = json!(151_646);
    assert!(error(with_id).ends_with(
        "tokenizer.json`: `image_token_index` of config.json is 151646, must be below the model's `vocab_size` 1387"
    ));
    let with_other = |config: &mut Value| config["image_token_index"] = json!(7);
    assert!(
        error(with_other).contains("`<image>` has the id 3, must be `image_token_index` of config.json, 7")
    );
    let small = |config: &mut Value| config["text_config"]["vocab_size"] = json!(5);
    assert!(error(small).contains("its largest id is 1386, must be below the model's `vocab_size` 5"));
}

#[test]
fn media_come_in_the_order_of_the_text() {
    // The demo's template keeps the record's order; one that puts images first does not.
    let dir = tempfile::tempdir().unwrap();
    crate::demo::write_model(dir.path()).unwrap();
    let template = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}\
        {% for p in m.content if p.type == 'image' %}<image>{% endfor %}\
        {% for p in m.content if p.type == 'video' %}<video>{% endfor %}\
        {% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}";
    std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    let files = ModelFiles::read(dir.path()).unwrap();
    let config = files.family_files().unwrap().config;
    let chat = ChatTokenizer::open(&files, &config, files.family().unwrap().as_ref()).unwrap();
    let record = json!({"image": "a", "video": "b", "conversations": [
        {"from": "human", "value": "<video> then <image>"}, {"from": "gpt", "value": "cup"}]});
    let sample = Conversation::parse(&record).unwrap();
    let tokens = chat.tokenize(&sample, &[&features(2), &features(3)]).unwrap();
    assert_eq!(tokens.in_text_order(vec!["video", "image"]), ["image", "video"]);
    let tokens = tokens.expand();
    assert_eq!(tokens.input_ids[..5], [3, 3, 3, 4, 4]);
    assert_eq!(tokens.feature_mask[..6], [true, true, true, true, true, false]);
}

#[test]
fn a_text_that_writes_a_feature_token_is_refused() {
    let text = |text: &str| json!({"conversations": [{"from": "gpt", "value": text}]});
    let answer = Conversation::parse(&text("a cup")).unwrap();
    assert!(tokenizer().tokenize(&answer, &[]).is_ok());
    let mut forged = answer;
    forged.turns[0].parts = vec![TurnPart::Text("a <image> cup".to_owned())];
    assert_eq!(
        tokenizer().tokenize(&forged, &[]).unwrap_err().cause,
        "the text of turn 0 holds `<image>`, which stands for a medium: must not"
    );
}

proptest! {
    #[test]
    fn counting_equals_encoding(
        texts in prop::collection::vec(("[a-z <>|\n.\\PC]{0,30}", 0..3_usize, 0..3_usize), 1..5),
        features in prop::collection::vec(1_u32..50, 15),
    ) {
        let roles = ["human", "gpt", "system"];
        let mut images = 0;
        let turns: Vec<_> = texts
            .iter()
            .map(|(text, role, marks)| {
                let marks = if *role == 1 { 0 } else { *marks };
                images += marks;
                (roles[*role], format!("{text}{}", "<image>".repeat(marks)))
            })
            .collect();
        let turns: Vec<_> = turns.iter().map(|(role, text)| (*role, text.as_str())).collect();
        prop_assume!(turns.iter().all(|(_, text)| !text.contains("<video>") && !text.contains("<audio>")));
        let shapes: Vec<_> = features.iter().map(|&n| self::features(n)).collect();
        let shapes: Vec<_> = shapes.iter().collect();
        let tokenized = tokenizer().tokenize(&conversation(&turns, images), &shapes).unwrap();
        let tokens = tokenized.expand();
        prop_assert_eq!(tokens.labels.len(), tokens.input_ids.len());
        prop_assert_eq!(tokens.feature_mask.len(), tokens.input_ids.len());
        let counted = tokenized.count().unwrap();
        prop_assert_eq!(counted, (tokens.input_ids.len() as u32, tokens.label_tokens()));
        let filled: u32 = features[..images].iter().sum();
        prop_assert_eq!(tokens.feature_mask.iter().filter(|m| **m).count() as u32, filled);
    }
}
