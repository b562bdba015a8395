//! The table, held to clap and to the page for users.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

use clap::CommandFactory;

use super::table::Values;
use super::*;

fn known_to_clap() -> BTreeSet<String> {
    let mut program = crate::Cli::command();
    program.build();
    let serve = program.find_subcommand("serve").unwrap();
    longs(serve).map(|long| format!("--{long}")).collect()
}

#[test]
fn every_flag_is_either_claps_or_ignored_or_refused() {
    let (clap, mut seen) = (known_to_clap(), BTreeSet::new());
    for row in rows() {
        for usage in row.flags {
            let flag = flag_of(usage);
            assert!(seen.insert(flag), "{flag} is twice in the table");
            let taken = matches!(row.fate, Fate::Taken(_));
            assert_eq!(taken, clap.contains(flag), "{flag}: {:?}", row.fate);
        }
    }
    for values in VALUES {
        assert!(clap.contains(values.flag), "{} is no flag of clap's", values.flag);
    }
}

#[test]
fn no_help_lists_a_flag_that_is_ignored() {
    let mut program = crate::Cli::command();
    program.build();
    let mut serve = program.find_subcommand("serve").unwrap().clone();
    let help = serve.render_long_help().to_string();
    for row in rows().filter(|row| !matches!(row.fate, Fate::Taken(_))) {
        for usage in row.flags {
            let listed = help.split_whitespace().any(|word| word == flag_of(usage));
            assert!(!listed, "{usage} is in the help");
        }
    }
}

/// The page's table.
fn page() -> String {
    let mut text = String::from("| flag | here | because |\n|---|---|---|\n");
    let mut row = |flags: &str, fate: &str, why: &str| {
        writeln!(text, "| {flags} | {fate} | {why} |").unwrap();
    };
    for Flags { flags, fate } in rows() {
        let flags = flags.iter().map(|usage| format!("`{usage}`")).collect::<Vec<_>>().join(" ");
        match fate {
            Fate::Taken(how) => row(&flags, "taken", how),
            Fate::Ignored(why) => row(&flags, "ignored", why),
            Fate::Refused(why) => row(&flags, "refused", why),
            Fate::Only(so, why) => {
                let so = so.iter().map(|value| format!("`{value}`")).collect::<Vec<_>>();
                row(&flags, &format!("{} taken, else refused", so.join(" or ")), why);
            }
        }
    }
    for Values { flag, values, fate } in VALUES {
        let values = values.iter().map(|value| format!("`{flag} {value}`")).collect::<Vec<_>>();
        match fate {
            ValueFate::Means(ours, why) => row(&values.join(" "), &format!("means `{ours}`"), why),
            ValueFate::Refused(why) => row(&values.join(" "), "refused", why),
        }
    }
    text
}

#[test]
fn the_page_for_users_says_what_the_table_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(PAGE);
    let text = std::fs::read_to_string(&path).unwrap();
    let (head, table) = text.split_at(text.find("| flag |").unwrap());
    if std::env::var_os("AQUILA_WRITE_DOCS").is_some() {
        std::fs::write(&path, format!("{head}{}", page())).unwrap();
        return;
    }
    assert!(table == page(), "{PAGE} is behind the table: run this test with AQUILA_WRITE_DOCS=1");
}

fn taken(line: &str) -> Result<Taken> {
    let args = ["aquila", "serve"].into_iter().chain(line.split_whitespace());
    take(args.map(OsString::from), crate::Cli::command())
}

#[test]
fn what_the_table_takes_leaves_the_rest_as_it_was() {
    for (line, left, notes) in [
        ("tiny --tp 1 --port 0", "tiny --port 0", 0),
        ("--tp=1 --port=0", "--port=0", 0),
        ("--cuda-graph-bs-prefill 1 2 4 --port 0", "--port 0", 1),
        ("--enable-metrics tiny", "tiny", 1),
        ("--model-checksum --port 0 --help", "--port 0 --help", 0),
        ("--dtype half tiny", "--dtype=bfloat16 tiny", 1),
        ("--dtype=float16 tiny", "--dtype=bfloat16 tiny", 1),
        ("--stop x -- --tp 2", "--stop x -- --tp 2", 0),
    ] {
        let taken = taken(line).unwrap();
        let args: Vec<&str> = taken.args.iter().skip(2).filter_map(|arg| arg.to_str()).collect();
        assert_eq!(args.join(" "), left, "{line}");
        assert_eq!(taken.notes.len(), notes, "{line}: {:?}", taken.notes);
    }
}

#[test]
fn one_slip_is_recognised_and_two_are_not() {
    for (typed, meant, is) in [
        ("promt", "prompt", true),
        ("prommpt", "prompt", true),
        ("porpmt", "prompt", false),
        ("pormpt", "prompt", true),
        ("prombt", "prompt", true),
        ("max-token", "max-tokens", true),
        ("tp", "top-p", false),
        ("min-tokens", "max-tokens", false),
    ] {
        assert_eq!(one_slip(typed, meant), is, "{typed} for {meant}");
    }
}
