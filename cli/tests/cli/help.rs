//! Help, completions and manual pages.

use crate::support::*;

/// The headings of a help, without `:`.
fn headings(help: &str) -> Vec<&str> {
    help.lines().filter(|line| !line.starts_with(' ')).filter_map(|line| line.strip_suffix(':')).collect()
}

#[test]
fn options_stand_under_headings_and_the_short_help_has_a_sentence_for_each() {
    let [short, long] = ["-h", "--help"].map(|option| stdout(&kyklos(&["attend", option])));
    let expected = [
        "Options",
        "Input",
        "Parallelism",
        "Mask and scores",
        "Device",
        "Browser tabs (--device tab)",
        "Network between ranks",
        "One process of several",
        "Recovery",
        "Output",
        "Measurement",
        "Diagnosis",
    ];
    assert_eq!(headings(&long), expected);
    assert_eq!(headings(&short), expected);
    assert!(short.lines().count() < long.lines().count() * 2 / 3, "{short}");
    for text in [&short, &long] {
        let (_, rest) = text.split_once("Options:\n").unwrap();
        let options = rest.split("\nInput:\n").next().unwrap().matches("  -").count();
        assert_eq!(options, 1, "every option but --help has a heading");
    }
    let option = |text: &str, name: &str| {
        text.lines().any(|line| line.trim_start().split([' ', ',']).any(|word| word == name))
    };
    for name in ["--input", "--mesh", "--mask", "--device", "--network", "--output", "--on-loss", "--trace"] {
        assert!(option(&short, name) && option(&long, name), "{name}");
    }
    assert!(long.contains("- ring: "), "one line for each strategy");
    assert!(!short.contains("- ring: "));
}

#[test]
fn help_of_a_command_is_that_of_its_option() {
    for command in [&["attend"][..], &["bench", "strategies"], &["certs", "issue"]] {
        let asked = kyklos(&[&["help"][..], command].concat());
        succeeds(&asked);
        assert_eq!(stdout(&asked), stdout(&kyklos(&[command, &["--help"]].concat())));
    }
    // Also where a launcher would start it.
    for command in [&["attend"][..], &["bench", "strategies"]] {
        let asked = kyklos(&[&["launch", "-n", "2", "--"], command, &["--help"]].concat());
        succeeds(&asked);
        assert_eq!(stdout(&asked), stdout(&kyklos(&[&["help"][..], command].concat())));
    }
    refused(&kyklos(&["help", "fly"]), &["unrecognized subcommand 'fly'"]);
    assert_eq!(kyklos(&["help"]).stdout, kyklos(&["--help"]).stdout);
}

#[test]
fn help_has_colours_only_where_they_are_wanted() {
    let coloured = |variables: &[(&str, &str)]| {
        let mut command = command(&["attend", "-h"]);
        for name in ["NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE"] {
            command.env_remove(name);
        }
        let output = command.envs(variables.iter().copied()).output().unwrap();
        succeeds(&output);
        stdout(&output).contains('\u{1b}')
    };
    assert!(!coloured(&[]), "a pipe");
    assert!(coloured(&[("CLICOLOR_FORCE", "1")]));
    assert!(!coloured(&[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")]));
}

#[test]
fn completions_and_manual_pages_have_every_command() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let output = kyklos(&["completions", shell]);
        succeeds(&output);
        for word in ["attend", "join-deadline", "certs", "strategies"] {
            assert!(stdout(&output).contains(word), "{shell} has no {word}");
        }
    }
    refused(&kyklos(&["completions", "tcsh"]), &["invalid value 'tcsh'", "fish, powershell or zsh"]);
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("share/man1");
    succeeds(&kyklos(&["man", pages.to_str().unwrap()]));
    for name in ["kyklos", "kyklos-attend", "kyklos-bench-strategies", "kyklos-certs-issue", "kyklos-doctor"]
    {
        let page = std::fs::read_to_string(pages.join(name).with_extension("1")).unwrap();
        assert!(page.contains(".SH NAME") && page.contains(".SH OPTIONS"), "{name}: {page}");
    }
    let page = std::fs::read_to_string(pages.join("kyklos-attend.1")).unwrap();
    for words in [".SH \"MASK AND SCORES\"", "\\-\\-on\\-loss"] {
        assert!(page.to_uppercase().contains(&words.to_uppercase()), "{words} is not in:\n{page}");
    }
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    refused(&kyklos(&["man", file.join("man1").to_str().unwrap()]), &["cannot write the manual pages to"]);
}
