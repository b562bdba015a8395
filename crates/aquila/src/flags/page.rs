//! The page of all flags for users, made from what the commands take and held to it.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use clap::{Arg, Command, CommandFactory};

const PAGE: &str = "docs/flags.md";

const HEAD: &str = "# Flags\n
Made from the program by `AQUILA_WRITE_DOCS=1 cargo test -p aquila --lib page`; a test holds it to \
what the commands take. `aquila COMMAND --help` says the same in a terminal, with the environment \
variables and the exit codes. [sglang-flags.md](sglang-flags.md) has the flags of SGLang that are \
taken, ignored or refused.\n";

/// One flag, with the commands that take it in this way.
struct Row {
    flag: String,
    default: String,
    help: String,
    commands: Vec<String>,
}

/// Every command that runs something, by the words that call it.
fn commands(program: &Command, words: &str, all: &mut Vec<(String, Command)>) {
    for command in program.get_subcommands().filter(|command| command.get_name() != "help") {
        let words = format!("{words}{}", command.get_name());
        match command.has_subcommands() {
            true => commands(command, &format!("{words} "), all),
            false => all.push((words, command.clone())),
        }
    }
}

/// As help has it, with what a table cannot hold made harmless.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('<', "&lt;").replace('\n', " ")
}

fn flag(arg: &Arg) -> String {
    let values = arg.get_value_names().filter(|_| arg.get_action().takes_values());
    let values = values.map_or(String::new(), |names| names.join(" "));
    let Some(long) = arg.get_long() else { return format!("`[{values}]`") };
    let short = arg.get_short().map_or(String::new(), |short| format!("`-{short}`, "));
    let values = if values.is_empty() { values } else { format!(" {values}") };
    let aliases = arg.get_visible_aliases().unwrap_or_default();
    let aliases: String = aliases.iter().map(|alias| format!(", `--{alias}`")).collect();
    format!("{short}`--{long}{values}`{aliases}")
}

fn row(arg: &Arg) -> Row {
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let told = help.rfind("[default: ").filter(|_| help.ends_with(']'));
    let (help, told) = match told {
        Some(at) => {
            (help[..at].trim_end().to_owned(), Some(help[at + 10..help.len() - 1].to_owned()))
        }
        None => (help.clone(), None),
    };
    let of_clap = arg.get_default_values().first().and_then(|value| value.to_str());
    let of_clap = of_clap.filter(|_| arg.get_action().takes_values());
    let default = told.or(of_clap.map(|value| format!("`{value}`"))).unwrap_or_default();
    let values = arg.get_possible_values();
    let explained = values.iter().any(|value| value.get_help().is_some());
    let one = |value: &clap::builder::PossibleValue| match value.get_help() {
        Some(help) => format!("`{}`: {help}", value.get_name()),
        None => format!("`{}`", value.get_name()),
    };
    let values: Vec<String> = match arg.get_action().takes_values() {
        true => values.iter().filter(|value| !value.is_hide_set()).map(one).collect(),
        false => Vec::new(),
    };
    let values = match (values.is_empty(), explained) {
        (true, _) => String::new(),
        (false, false) => format!(". One of {}", values.join(", ")),
        (false, true) => format!(". {}", values.join("; ")),
    };
    let help = cell(&format!("{help}{values}"));
    Row { flag: flag(arg), default: cell(&default), help, commands: Vec::new() }
}

/// The page.
fn page() -> String {
    let mut program = crate::Cli::command();
    program.build();
    let mut all = Vec::new();
    commands(&program, "", &mut all);
    let mut text = format!("{HEAD}\n| command | what it does |\n|---|---|\n");
    for (words, command) in &all {
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        writeln!(text, "| `aquila {words}` | {} |", cell(&about)).unwrap();
    }

    // Commands share whole groups: each is listed once, with who takes it.
    let (mut order, mut groups) = (Vec::new(), BTreeMap::<String, Vec<Row>>::new());
    for (words, command) in &all {
        for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
            if ["help", "version"].contains(&arg.get_id().as_str()) {
                continue;
            }
            let unnamed = match arg.is_positional() {
                true => "Arguments".to_owned(),
                false => format!("aquila {words}"),
            };
            let heading = arg.get_help_heading().map_or(unnamed, str::to_owned);
            if !order.contains(&heading) {
                order.push(heading.clone());
            }
            let group = groups.entry(heading).or_default();
            let new = row(arg);
            let same = |old: &&mut Row| {
                (&old.flag, &old.default, &old.help) == (&new.flag, &new.default, &new.help)
            };
            match group.iter_mut().find(same) {
                Some(old) => old.commands.push(words.clone()),
                None => group.push(Row { commands: vec![words.clone()], ..new }),
            }
        }
    }
    for heading in order {
        let rows = &groups[&heading];
        let names = |row: &Row| row.commands.iter().map(|c| format!("`{c}`")).collect::<Vec<_>>();
        // Those that most flags of a group have; the others say so themselves.
        let most = rows.iter().max_by_key(|row| row.commands.len()).expect("a group has flags");
        writeln!(text, "\n## {heading}\n\nTaken by {}.\n", names(most).join(", ")).unwrap();
        writeln!(text, "| flag | default | what it does |\n|---|---|---|").unwrap();
        for row in rows {
            let only = match row.commands == most.commands {
                true => String::new(),
                false => format!(" ({} alone)", names(row).join(", ")),
            };
            writeln!(text, "| {} | {} | {}{only} |", row.flag, row.default, row.help).unwrap();
        }
    }
    text
}

#[test]
fn the_page_of_flags_is_what_the_commands_take() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(PAGE);
    if std::env::var_os("AQUILA_WRITE_DOCS").is_some() {
        std::fs::write(&path, page()).unwrap();
        return;
    }
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text == page(), "{PAGE} is behind the flags: run this test with AQUILA_WRITE_DOCS=1");
}
