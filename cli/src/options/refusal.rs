//! Errors of the command-line parser on one line, without words of the parser's own types.

use std::error::Error;
use std::net::{AddrParseError, IpAddr};
use std::num::{IntErrorKind, ParseFloatError, ParseIntError};

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// clap's error on one line: the mistake, clap's tips, and where to read more.
pub(crate) fn one_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    if let Some(of_number) = of_number(error) {
        return of_number;
    }
    let mut parts: Vec<&str> = Vec::new();
    for line in text.lines().map(str::trim) {
        if line.starts_with("Usage:") || line.starts_with("For more information") {
            break;
        }
        // They are in the context too.
        if !line.is_empty() && !line.starts_with("[possible values:") {
            parts.push(line.strip_prefix("error: ").unwrap_or(line));
        }
    }
    let (first, rest) = parts.split_first().map_or(("", &[][..]), |(first, rest)| (*first, rest));
    let joined = rest.iter().fold(first.to_owned() + &of_values(error), |mut all, part| {
        all.push_str(if all.ends_with(':') { " " } else { "; " });
        all.push_str(part);
        all
    });
    match error.kind() {
        ErrorKind::UnknownArgument | ErrorKind::InvalidSubcommand | ErrorKind::MissingRequiredArgument => {
            format!("{joined}; kyklos --help and kyklos <command> --help list what there is")
        }
        _ => joined,
    }
}

/// The remedy of an option that takes one of a few values.
fn of_values(error: &clap::Error) -> String {
    match error.get(ContextKind::ValidValue) {
        Some(ContextValue::Strings(values)) if !values.is_empty() => {
            let (last, others) = values.split_last().map_or(("", &[][..]), |(last, others)| (last, others));
            let others = others.join(", ");
            if others.is_empty() { format!(": use {last}") } else { format!(": use {others} or {last}") }
        }
        _ => String::new(),
    }
}

/// The refusal of a number or an address that the standard library or clap cannot read.
fn of_number(error: &clap::Error) -> Option<String> {
    if error.kind() != ErrorKind::ValueValidation {
        return None;
    }
    let source = error.source()?;
    let remedy = if let Some(error) = source.downcast_ref::<ParseIntError>() {
        match error.kind() {
            IntErrorKind::PosOverflow => "this number is too large".to_owned(),
            IntErrorKind::Zero => "use a whole number from 1 on".to_owned(),
            _ => "use a whole number".to_owned(),
        }
    } else if source.is::<ParseFloatError>() {
        "use a number, such as 0.125".to_owned()
    } else if let Some(error) = source.downcast_ref::<AddrParseError>() {
        match "".parse::<IpAddr>() {
            Err(of_ip) if of_ip == *error => "use an IP address, such as 192.168.1.7".to_owned(),
            _ => "use an IP address and a port, such as 127.0.0.1:9000".to_owned(),
        }
    } else {
        // clap's own range, which has no type. The number before it is no text of the user.
        let text = source.to_string();
        let (first, last) = text.split_once(" is not in ")?.1.split_once("..=")?;
        let [first, last] = [first, last].map(|number| number.parse::<u64>().ok());
        format!("use a whole number from {} to {}", first?, last?)
    };
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text),
        _ => None,
    };
    let (option, value) = (context(ContextKind::InvalidArg)?, context(ContextKind::InvalidValue)?);
    Some(format!("invalid value '{value}' for '{option}': {remedy}"))
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::num::NonZeroU32;

    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Options {
        #[arg(long)]
        ranks: Option<NonZeroU32>,
        #[arg(long)]
        port: Option<u16>,
        #[arg(long)]
        seed: Option<u64>,
        #[arg(long, allow_negative_numbers = true)]
        scale: Option<f32>,
        #[arg(long)]
        bind: Option<IpAddr>,
        #[arg(long)]
        metrics: Option<SocketAddr>,
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..=3650))]
        days: Option<u32>,
        #[arg(long, value_parser = ["udp", "tcp", "rdma"])]
        network: Option<String>,
    }

    #[test]
    fn no_refusal_has_words_of_the_parser() {
        for (option, value, remedy) in [
            ("--ranks", "two", "use a whole number"),
            ("--ranks", "", "use a whole number"),
            ("--ranks", "0", "use a whole number from 1 on"),
            ("--ranks", "4294967296", "this number is too large"),
            ("--port", "x", "use a whole number"),
            ("--port", "65536", "use a whole number from 0 to 65535"),
            ("--seed", "99999999999999999999", "this number is too large"),
            ("--scale", "1,5", "use a number, such as 0.125"),
            ("--bind", "node1", "use an IP address, such as 192.168.1.7"),
            ("--metrics", "9000", "use an IP address and a port, such as 127.0.0.1:9000"),
            ("--days", "0", "use a whole number from 1 to 3650"),
            ("--network", "infiniband", "use udp, tcp or rdma"),
        ] {
            let line = one_line(&Options::try_parse_from(["kyklos", option, value]).unwrap_err());
            assert!(line.starts_with(&format!("invalid value '{value}' for '{option} <")), "{line}");
            assert!(line.ends_with(&format!(">': {remedy}")), "{line}");
        }
    }
}
