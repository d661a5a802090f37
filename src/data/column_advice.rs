//! What to do about rows of which no column is known.

/// What columns of questions and of answers are called.
const QUESTIONS: [&str; 8] = ["question", "query", "input", "source", "user", "problem", "instruction", "prompt"];
const ANSWERS: [&str; 8] = ["answer", "response", "output", "target", "assistant", "solution", "completion", "reply"];
/// What is reported for rows that have no answer.
pub(super) const NO_ANSWERS: &str =
    "these are prompts without answers: `medusa distill --prompts` lets the backbone write the answers";

/// How to name the columns of a row of which none is known.
pub(super) fn advice(found: &[String]) -> String {
    let is_plain = |name: &String| name.chars().all(|letter| letter.is_alphanumeric() || "_-.".contains(letter));
    let named = |names: [&str; 8]| {
        found.iter().find(|name| is_plain(name) && names.contains(&name.to_lowercase().as_str())).map(String::as_str)
    };
    let keys = match (named(QUESTIONS), named(ANSWERS), found) {
        (Some(question), Some(answer), _) => [("prompt", question), ("completion", answer)].to_vec(),
        _ if found.iter().any(|name| ["prompt", "prompt_ids", "turns"].contains(&name.as_str())) => {
            return NO_ANSWERS.to_owned();
        }
        (_, _, [only]) if is_plain(only) => vec![("text", only.as_str())],
        _ => vec![("prompt", "COLUMN"), ("completion", "COLUMN")],
    };
    let typed = keys.iter().map(|(key, column)| format!("{key}={column}")).collect::<Vec<_>>().join(",");
    let written = keys.iter().map(|(key, column)| format!("{key} = {column:?}")).collect::<Vec<_>>().join(", ");
    let chat = match keys[..] {
        [(_, asked), (_, said)] => format!(" (raw text) or instruction={asked},output={said} (a conversation)"),
        _ => String::new(),
    };
    format!("name the columns to read: --columns {typed}{chat}; in a recipe data.columns = {{ {written} }}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_that_are_not_known_are_answered_with_the_flag_that_names_them() {
        let advice = |found: &[&str]| advice(&found.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
        assert_eq!(
            advice(&["id", "Question", "Answer"]),
            "name the columns to read: --columns prompt=Question,completion=Answer (raw text) or instruction=Question,output=Answer \
             (a conversation); in a recipe data.columns = { prompt = \"Question\", completion = \"Answer\" }"
        );
        assert!(advice(&["prompt", "response"]).contains("--columns prompt=prompt,completion=response (raw"));
        assert!(advice(&["story"]).contains("--columns text=story; in a recipe data.columns = { text = \"story\" }"));
        assert!(advice(&["a", "b"]).contains("--columns prompt=COLUMN,completion=COLUMN (raw"));
        assert!(advice(&["my story"]).contains("COLUMN"));
        for prompts in [&["prompt"][..], &["prompt", "category"], &["question_id", "turns"]] {
            assert_eq!(advice(prompts), NO_ANSWERS);
        }
    }
}
