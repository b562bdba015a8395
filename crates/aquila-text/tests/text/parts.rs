//! Reasoning, text and tool calls of an answer: what is told apart, and that it does not depend on
//! how the text is cut.

use aquila_text::{AnswerParser, GrammarSpec, Part, ReasoningFormat, ToolCallFormat};
use proptest::prelude::*;

const HERMES: ToolCallFormat = ToolCallFormat::Hermes;
const LLAMA: ToolCallFormat = ToolCallFormat::Llama3;
const MISTRAL: ToolCallFormat = ToolCallFormat::Mistral;

fn parser(format: ToolCallFormat) -> AnswerParser {
    AnswerParser::new().with_tools(format, vec!["add".into(), "get weather".into()])
}

/// The parts of a text that comes in these pieces, with pieces of one part joined.
fn parts<'a>(mut parser: AnswerParser, pieces: impl IntoIterator<Item = &'a str>) -> Vec<Part> {
    let mut out = Vec::new();
    pieces.into_iter().for_each(|piece| parser.push(piece, &mut out));
    parser.finish(&mut out);
    let mut joined: Vec<Part> = Vec::new();
    for part in out {
        match (joined.last_mut(), &part) {
            (Some(Part::Text(text)), Part::Text(more))
            | (Some(Part::Reasoning(text)), Part::Reasoning(more))
            | (Some(Part::Arguments { piece: text, .. }), Part::Arguments { piece: more, .. }) => {
                text.push_str(more);
            }
            _ => joined.push(part),
        }
    }
    joined
}

fn read(format: ToolCallFormat, text: &str) -> Vec<Part> {
    parts(parser(format), [text])
}

fn text(text: &str) -> Part {
    Part::Text(text.into())
}

fn call(index: usize, name: &str, arguments: &str) -> Vec<Part> {
    vec![
        Part::CallBegin { index, name: name.into() },
        Part::Arguments { index, piece: arguments.into() },
        Part::CallEnd { index },
    ]
}

#[test]
fn calls_of_hermes_are_told_from_text() {
    let written = "Let me see.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": [1, 2]}}\n\
                   </tool_call>\n<tool_call>{\"arguments\":{},\"name\":\"get weather\"}</tool_call>\n";
    let expected = [
        vec![text("Let me see.")],
        call(0, "add", "{\"a\": [1, 2]}"),
        call(1, "get weather", "{}"),
    ];
    assert_eq!(read(HERMES, written), expected.concat());
}

#[test]
fn calls_of_llama_are_the_whole_answer() {
    let one = "{\"name\": \"add\", \"parameters\": {\"a\": \"}\"}}";
    assert_eq!(read(LLAMA, one), call(0, "add", "{\"a\": \"}\"}"));
    let both = format!("<|python_tag|>{one}; {one}");
    let expected = [call(0, "add", "{\"a\": \"}\"}"), call(1, "add", "{\"a\": \"}\"}")];
    assert_eq!(read(LLAMA, &both), expected.concat());
    // JSON within a text is no call.
    let quoted = format!("For example {one}");
    assert_eq!(read(LLAMA, &quoted), [text(&quoted)]);
}

#[test]
fn calls_of_mistral_come_as_a_list() {
    let written = "[TOOL_CALLS] [{\"name\": \"add\", \"arguments\": {\"a\": 1}}, \
                   {\"name\": \"get weather\", \"arguments\": {\"b\": null}, \"id\": \"x\"}]";
    let expected = [call(0, "add", "{\"a\": 1}"), call(1, "get weather", "{\"b\": null}")];
    assert_eq!(read(MISTRAL, written), expected.concat());
}

#[test]
fn what_only_looks_like_a_call_stays_text() {
    for written in [
        "<tool_call>",
        "<tool_call>{\"name\": \"add\"",
        "<tool_call>{\"name\": \"add\"}</tool_call>",
        "<tool_call>{\"name\": \"rm\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"add\", \"arguments\": \"{}\"}</tool_call> and so on",
        "<tool_call>{\"name\": \"add\", \"name\": \"add\"}</tool_call>",
        "<tool_call>{\"name\": 12}</tool_call>",
        "<tool_call>add(1)</tool_call>\n",
        "a <tool_cal b </tool_call> \n",
        "",
        " \n",
    ] {
        let expected = if written.is_empty() { vec![] } else { vec![text(written)] };
        assert_eq!(read(HERMES, written), expected, "{written}");
    }
}

#[test]
fn a_call_that_breaks_off_says_what_it_was() {
    for (rest, after) in [("", ""), ("}{", "}{")] {
        let begun = "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": ";
        let mut expected = vec![
            Part::CallBegin { index: 0, name: "add".into() },
            Part::Arguments { index: 0, piece: "{\"a\": ".into() },
            Part::CallBroken { index: 0, raw: begun.into() },
        ];
        expected.extend((!after.is_empty()).then(|| text(after)));
        assert_eq!(read(HERMES, &format!("{begun}{rest}")), expected);
    }
}

#[test]
fn reasoning_ends_at_its_mark() {
    let with = |begun| AnswerParser::new().with_reasoning(begun);
    let reasoning = |text: &str| Part::Reasoning(text.into());
    let expected = [reasoning("1 + 1"), text("Two. </think>")];
    assert_eq!(parts(with(false), ["<think>\n1 + 1\n</think>\n\nTwo. </think>"]), expected);
    assert_eq!(parts(with(true), ["1 + 1\n</think>\n\nTwo. </think>"]), expected);
    assert_eq!(parts(with(true), ["<think>1 + 1</think>Two. </think>"]), expected);
    assert_eq!(parts(with(false), ["1 + 1 </think>"]), [text("1 + 1 </think>")]);
    assert_eq!(parts(with(true), [" 1 + 1 </thin"]), [reasoning("1 + 1 </thin")]);
    assert_eq!(parts(with(false), ["<think></think>"]), []);
}

#[test]
fn a_prompt_may_have_begun_the_reasoning() {
    let (qwen, deepseek) = (ReasoningFormat::Qwen3, ReasoningFormat::DeepseekR1);
    for (prompt, with_qwen, with_deepseek) in [
        ("<|im_start|>assistant\n", false, true),
        ("<|im_start|>assistant\n<think>\n", true, true),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", false, false),
        ("what is <think>? <|im_start|>assistant\n", false, true),
    ] {
        assert_eq!(qwen.begins_in(prompt), with_qwen, "{prompt}");
        assert_eq!(deepseek.begins_in(prompt), with_deepseek, "{prompt}");
        let answer = GrammarSpec::Regex("[0-9]+".into());
        let before =
            |begun| GrammarSpec::AfterReasoning { begun, answer: Box::new(answer.clone()) };
        // A model that was told not to think must answer at once.
        let told = prompt.contains("</think>");
        let after = |begun| if told { answer.clone() } else { before(begun) };
        assert_eq!(qwen.before(prompt, answer.clone()), after(with_qwen), "{prompt}");
        assert_eq!(deepseek.before(prompt, answer.clone()), after(with_deepseek), "{prompt}");
    }
}

#[test]
fn formats_have_the_names_of_sglang() {
    assert_eq!(ToolCallFormat::named("qwen25"), Some(HERMES));
    assert_eq!(ToolCallFormat::named("llama3"), Some(LLAMA));
    assert_eq!(ToolCallFormat::named("pythonic"), None);
    assert_eq!(ReasoningFormat::named("deepseek-r1"), Some(ReasoningFormat::DeepseekR1));
}

/// Texts made of what calls and reasoning are made of.
fn answers() -> impl Strategy<Value = String> {
    let word = prop::sample::select(vec![
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[",
        "]",
        ",",
        ";",
        "{\"name\": \"add\", \"arguments\": {\"ä\": [1.5e3, \"\\u00e9\\n\", true]}}",
        "{\"parameters\": {\"x\": {}}, \"name\": \"get weather\"}",
        "{\"name\": \"add\", \"parameters\": {",
        "{\"name\": \"other\", \"arguments\": {}}",
        "\"a\": 1",
        "}",
        "}}",
        " ",
        "\n",
        "<think>",
        "</think>",
        "words — wörter",
        "<",
        "<tool",
        "</",
        "nul",
    ]);
    prop::collection::vec(word, 0..14).prop_map(|words| words.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn parts_do_not_depend_on_how_the_text_is_cut(
        answer in answers(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        format in prop::sample::select(vec![HERMES, LLAMA, MISTRAL]),
        reasoning in prop::sample::select(vec![None, Some(false), Some(true)]),
    ) {
        let make = || match reasoning {
            None => parser(format),
            Some(begun) => parser(format).with_reasoning(begun),
        };
        let whole = parts(make(), [answer.as_str()]);
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(answer.len() + 1)).collect();
        cuts.retain(|&cut| answer.is_char_boundary(cut));
        cuts.sort_unstable();
        let edges: Vec<usize> = [vec![0], cuts, vec![answer.len()]].concat();
        let pieces = edges.windows(2).map(|edge| &answer[edge[0]..edge[1]]);
        prop_assert_eq!(&parts(make(), pieces), &whole);
        let characters: Vec<String> = answer.chars().map(String::from).collect();
        prop_assert_eq!(&parts(make(), characters.iter().map(String::as_str)), &whole);
    }

    #[test]
    fn no_text_is_lost_without_calls(answer in answers()) {
        let whole = AnswerParser::new().with_tools(HERMES, Vec::new());
        let expected: Vec<Part> = Some(&answer).filter(|a| !a.is_empty()).map(|a| text(a)).into_iter().collect();
        prop_assert_eq!(parts(whole, [answer.as_str()]), expected);
    }
}
