//! Commands in the documentation: those of medusa and medusa-train are parsed with the programs' own parsers, and the
//! flags and files that they name exist.

use std::path::Path;

use clap::{Command, CommandFactory};
use medusa::cli::{MedusaCommand, MedusaTrainCommand};

use super::{Page, ROOT, assert_none, pages, recipes};

/// Other programs that the documentation uses.
const OTHERS: [&str; 13] =
    ["cargo", "curl", "export", "head", "hf", "ln", "pip", "podman", "printf", "python3", "rm", "srun", "torchrun"];
/// A command's word that starts with one of these names a file of the repository.
const FOLDERS: [&str; 8] =
    ["scripts/", "recipes/", "data/tiny/", "data/smollm2/", "docs/", "tests/", "examples/", "benches/"];

/// Splits a shell script into commands and words, with the shell features that the documentation uses: comments,
/// quotes, variable assignments, continued lines, pipes, redirections.
fn commands(script: &str) -> Vec<Vec<String>> {
    let script = script.replace("\\\n", " ");
    let mut commands = vec![vec![]];
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut in_comment = false;
    for c in script.chars().chain(['\n']) {
        if in_comment && c != '\n' {
            continue;
        }
        match (quote, c) {
            (Some(open), _) if open == c => quote = None,
            (Some(_), _) => word.get_or_insert_default().push(c),
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => in_comment = true,
            (None, ' ' | '\n' | '|' | ';' | '&' | '>') => {
                commands.last_mut().expect("at least one").extend(word.take());
                match c {
                    ' ' => {}
                    '>' => commands.last_mut().expect("at least one").push(">".into()),
                    _ => commands.push(vec![]),
                }
                in_comment = false;
            }
            (None, _) => word.get_or_insert_default().push(c),
        }
    }
    commands.into_iter().map(|words| without_shell(&words)).filter(|words| !words.is_empty()).collect()
}

/// A command without leading variable assignments and without redirections.
fn without_shell(words: &[String]) -> Vec<String> {
    let is_set = |word: &&String| word.split_once('=').is_some_and(|(name, _)| name.chars().all(char::is_alphanumeric));
    let words: Vec<_> = words.iter().skip_while(is_set).cloned().collect();
    words.split(|word| word == ">").enumerate().flat_map(|(at, part)| part.iter().skip(at.min(1)).cloned()).collect()
}

/// The first error of a command, if any.
fn fault(words: &[String]) -> Option<String> {
    let program = words[0].rsplit('/').next().unwrap_or_default();
    match program {
        "medusa" => wrong_usage(MedusaCommand::command(), words),
        "medusa-train" => wrong_usage(MedusaTrainCommand::command(), words),
        _ if OTHERS.contains(&program) || words[0].contains("scripts/") => None,
        _ => Some(format!("{program}: a program that tests/readme/commands.rs does not know")),
    }
    .or_else(|| missing_target(words))
    .or_else(|| missing_file(words))
}

fn wrong_usage(command: Command, words: &[String]) -> Option<String> {
    let error = command.try_get_matches_from(words).err()?;
    error.use_stderr().then(|| error.to_string().lines().next().unwrap_or_default().to_owned())
}

/// A target that `cargo` is called with and the package does not have.
fn missing_target(words: &[String]) -> Option<String> {
    let kinds = [("--example", "examples"), ("--bench", "benches"), ("--test", "tests")];
    let asked = |(flag, folder): (&str, &str)| {
        let name = words.iter().skip_while(|word| *word != flag).nth(1).filter(|_| words[0] == "cargo")?;
        let path = Path::new(ROOT).join(folder).join(name);
        (!path.is_dir() && !path.with_extension("rs").is_file()).then(|| format!("there is no {folder}/{name}"))
    };
    kinds.into_iter().find_map(asked)
}

fn missing_file(words: &[String]) -> Option<String> {
    let named = words.iter().filter_map(|word| {
        let begins = FOLDERS.iter().any(|folder| word.starts_with(folder)).then_some(word.as_str());
        begins.or_else(|| word.find("/scripts/").map(|at| &word[at + 1..]))
    });
    let missing = named.into_iter().find(|path| !path.contains('*') && !Path::new(ROOT).join(path).exists())?;
    Some(format!("there is no {missing}"))
}

/// The errors of a script's commands.
fn faults_of(place: &str, script: &str) -> Vec<String> {
    let faults = commands(script).into_iter().filter_map(|words| Some((fault(&words)?, words)));
    faults.map(|(fault, words)| format!("{place}: {}\n    {fault}", words.join(" "))).collect()
}

fn faults(page: &Page) -> Vec<String> {
    let mut faults = Vec::new();
    for block in page.code_blocks() {
        let place = format!("{}:{}", page.path.display(), block.line);
        match block.language {
            "bash" => faults.extend(faults_of(&place, &block.text)),
            "python" | "toml" | "text" => {}
            other => faults.push(format!("{place}: a code block of {other:?}; expected bash, python, toml or text")),
        }
    }
    faults
}

/// A recipe's commands: comments that start with three spaces.
fn script_of(recipe: &Page) -> String {
    recipe.text.lines().filter_map(|line| line.strip_prefix("#   ")).map(|line| format!("{line}\n")).collect()
}

/// Code spans in prose that name a flag which their command, or, without a command, any command, does not have.
fn unknown_flags(page: &Page) -> Vec<String> {
    let spans =
        page.prose().into_iter().flat_map(|(line, text)| text.split('`').skip(1).step_by(2).map(move |s| (line, s)));
    let unknown = |(line, span): (usize, &str)| {
        let known = flags_for(span)?;
        let flag = named_flags(span).find(|flag| !known.contains(flag))?;
        Some(format!("{}:{line}: `{span}`: there is no {flag}", page.path.display()))
    };
    spans.filter_map(unknown).collect()
}

fn named_flags(span: &str) -> impl Iterator<Item = String> {
    let words = span.split(|c: char| !c.is_ascii_alphanumeric() && c != '-');
    words.filter(|word| word.starts_with("--") && word.len() > 2).map(str::to_owned)
}

/// Flags that a code span may name: those of its subcommand, or of all subcommands if it starts with a flag. `None` if
/// it is not about this program.
fn flags_for(span: &str) -> Option<Vec<String>> {
    let (medusa, medusa_train) = (MedusaCommand::command(), MedusaTrainCommand::command());
    let flags =
        |command: &Command| command.get_arguments().filter_map(|a| Some(format!("--{}", a.get_long()?))).collect();
    let mut known: Vec<String> = flags(&medusa);
    known.extend(["--help", "--version"].map(str::to_owned));
    let mut words = span.split(' ').skip_while(|word| *word == "medusa");
    let first = words.next()?;
    if first.starts_with("--") {
        known.extend(medusa.get_subcommands().flat_map(flags));
    } else if first == "medusa-train" {
        known.extend(flags(&medusa_train));
    } else {
        known.extend(flags(medusa.find_subcommand(first)?));
    }
    Some(known)
}

#[test]
fn every_command_of_the_documentation_is_one() {
    let mut faults: Vec<String> = pages().iter().flat_map(faults).collect();
    for recipe in recipes() {
        faults.extend(faults_of(&recipe.path.display().to_string(), &script_of(&recipe)));
    }
    assert_none(&faults);
}

#[test]
fn every_flag_in_prose_is_one() {
    assert_none(&pages().iter().flat_map(unknown_flags).collect::<Vec<_>>());
}

#[test]
fn a_code_span_is_in_one_line() {
    let odd = |page: &Page| -> Vec<String> {
        let prose = page.prose().into_iter().filter(|(_, line)| line.matches('`').count() % 2 == 1);
        prose
            .map(|(line, _)| format!("{}:{line}: a code span that is not closed in its line", page.path.display()))
            .collect()
    };
    assert_none(&pages().iter().flat_map(odd).collect::<Vec<_>>());
    assert_eq!(odd(&Page::of("p.md", "a `b`\n`c\nd`")).len(), 2);
}

#[test]
fn a_script_is_read_word_by_word() {
    let words = |script| commands(script).iter().map(|words| words.join("|")).collect::<Vec<_>>();
    assert_eq!(words("# no\nmedusa a --b 'c d' # e\n\n"), ["medusa|a|--b|c d"]);
    assert_eq!(words("B=x H=y\nmedusa $B \\\n    \"#z\" > out.txt"), ["medusa|$B|#z"]);
    assert_eq!(words("printf 'a\\n' | medusa chat; ls && x"), ["printf|a\\n", "medusa|chat", "ls", "x"]);
}

#[test]
fn a_wrong_command_is_found() {
    let fault = |command: &str| faults_of("p.md:1", command).into_iter().next().unwrap_or_default();
    assert_eq!(fault("medusa doctor --json"), "");
    assert_eq!(fault("medusa generate --help"), "");
    assert!(fault("medusa docter").contains("unrecognized subcommand 'docter'"));
    assert!(fault("medusa generate --backbone B").contains("required arguments were not provided"));
    assert!(fault("medusa generate --backbone B --prompt a --engine gpu").contains("invalid value 'gpu'"));
    assert!(fault("medusa bench --backbone B --heads H --prompts P --sweep node=4").contains("no sweep \"node\""));
    assert!(fault("B=b medusa-train a.toml --chek").contains("unexpected argument '--chek'"));
    assert!(fault("medusa-train recipes/no.toml").contains("there is no recipes/no.toml"));
    assert!(fault("scripts/no").contains("there is no scripts/no"));
    assert!(fault("python3 scripts/no.py").contains("there is no scripts/no.py"));
    assert!(fault("folder/scripts/no").contains("there is no scripts/no"));
    assert!(fault("cargo bench --bench no").contains("there is no benches/no"));
    assert!(fault("wget x").contains("wget: a program that"));
    assert!(!faults(&Page::of("p.md", "```sh\nls\n```\n")).is_empty());
}

#[test]
fn a_flag_that_nobody_has_is_found() {
    let faults = |text: &str| unknown_flags(&Page::of("p.md", text));
    assert!(
        faults(
            "`--seed 3`, `generate --stop TEXT`, `medusa tree --nodes`, `a --b`, `medusa-train R [--check] [--resume]`"
        )
        .is_empty()
    );
    assert_eq!(faults("x `--no-such`"), ["p.md:1: `--no-such`: there is no --no-such"]);
    assert_eq!(faults("`tree --prompts`"), ["p.md:1: `tree --prompts`: there is no --prompts"]);
    assert_eq!(faults("`medusa-train --nodes`"), ["p.md:1: `medusa-train --nodes`: there is no --nodes"]);
}
