//! Slurm's lists of hosts and of tasks per host: `node[01-03,7]-x,other` and `2(x3),1`.

use crate::error::{Error, RequestKind, Result};

/// The hosts of a list, in its order. `origin` is where it was written, for errors.
pub(crate) fn hosts(list: &str, origin: &str) -> Result<Vec<String>> {
    let wrong = |why: &str| {
        Error::request(
            format!("{origin} is not a list of hosts: {why}"),
            "write it like node[01-03,7],other, or set the option coordinator",
        )
        .of(RequestKind::Coordinator)
    };
    if list.len() > LONGEST_LIST {
        return Err(wrong("it is too long"));
    }
    let mut all = Vec::new();
    for item in items(list).ok_or_else(|| wrong("brackets do not match"))? {
        let expanded = expand(item).map_err(wrong)?;
        if all.len() + expanded.len() > MOST_HOSTS {
            return Err(wrong("it names too many hosts"));
        }
        all.extend(expanded);
    }
    Ok(all)
}

/// Tasks on each host, in the order of the hosts.
pub(crate) fn tasks_per_host(list: &str, origin: &str) -> Result<Vec<u32>> {
    let wrong = || {
        Error::request(
            format!("{origin} does not say how many tasks each host has"),
            "it is written like 2(x3),1; let Slurm set it, or unset it",
        )
    };
    let mut all = Vec::new();
    for item in list.split(',') {
        let (tasks, times) = match item.strip_suffix(')').map(|item| item.split_once("(x")) {
            Some(Some((tasks, times))) => (tasks, times.parse().map_err(|_| wrong())?),
            Some(None) => return Err(wrong()),
            None => (item, 1_usize),
        };
        let tasks: u32 = tasks.parse().map_err(|_| wrong())?;
        if tasks as usize > MOST_HOSTS || times == 0 || times > MOST_HOSTS - all.len() {
            return Err(wrong());
        }
        all.extend(std::iter::repeat_n(tasks, times));
    }
    Ok(all)
}

/// Cuts at commas outside brackets. `None` if brackets do not match.
fn items(list: &str) -> Option<Vec<&str>> {
    let (mut inside, mut start, mut items) = (false, 0, Vec::new());
    for (at, c) in list.char_indices() {
        match c {
            '[' if inside => return None,
            '[' => inside = true,
            ']' if !inside => return None,
            ']' => inside = false,
            ',' if !inside => {
                items.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    items.push(&list[start..]);
    (!inside).then_some(items)
}

/// All hosts of one item: every bracket takes each of its values, the last bracket runs fastest.
fn expand(item: &str) -> Result<Vec<String>, &'static str> {
    let mut hosts = vec![String::new()];
    let mut rest = item;
    while let Some((before, after)) = rest.split_once('[') {
        let (ranges, behind) = after.split_once(']').ok_or("brackets do not match")?;
        let values = values(ranges)?;
        if hosts.len() * values.len() > MOST_HOSTS {
            return Err("it names too many hosts");
        }
        let with = |host: &String, value: &String| format!("{host}{before}{value}");
        hosts = hosts.iter().flat_map(|host| values.iter().map(move |value| with(host, value))).collect();
        rest = behind;
    }
    let fine = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
    for host in &mut hosts {
        host.push_str(rest);
        if host.is_empty() {
            return Err("a host has no name");
        }
        if host.len() > 253 || !host.chars().all(fine) {
            return Err("a host has a name that no host has");
        }
    }
    Ok(hosts)
}

/// `01-03,7` as 01, 02, 03, 7: as many digits as the first number of a range has.
fn values(ranges: &str) -> Result<Vec<String>, &'static str> {
    let number = |text: &str| -> Result<u64, &'static str> {
        let digits =
            (1..=MOST_DIGITS).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
        digits.then(|| text.parse().ok()).flatten().ok_or("what stands in brackets is not a number")
    };
    let mut values = Vec::new();
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (from, to, width) = (number(first)?, number(last)?, first.len());
        if to < from {
            return Err("a range runs backwards");
        }
        if to - from >= (MOST_HOSTS - values.len()) as u64 {
            return Err("it names too many hosts");
        }
        values.extend((from..=to).map(|value| format!("{value:0width$}")));
    }
    Ok(values)
}

/// Bytes of a list that are read.
const LONGEST_LIST: usize = 64 * 1024;
/// Hosts that a list may name: more than there can be ranks.
const MOST_HOSTS: usize = 4096;
/// Digits of a number in brackets.
const MOST_DIGITS: usize = 9;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_expanded_as_slurm_writes_them() {
        for (list, expected) in [
            ("node1", &["node1"][..]),
            ("a,b,c.d-e_f", &["a", "b", "c.d-e_f"]),
            ("node[01-03,7]-x,other", &["node01-x", "node02-x", "node03-x", "node7-x", "other"]),
            ("n[8-11]", &["n8", "n9", "n10", "n11"]),
            ("n[08-11]", &["n08", "n09", "n10", "n11"]),
            ("n[098-101]", &["n098", "n099", "n100", "n101"]),
            ("r[1-2]n[0-1]", &["r1n0", "r1n1", "r2n0", "r2n1"]),
            ("[1-2]", &["1", "2"]),
            ("n[5]", &["n5"]),
            ("n[3,1]", &["n3", "n1"]),
        ] {
            assert_eq!(hosts(list, "L").unwrap(), expected, "{list}");
        }
        assert_eq!(hosts("n[0001-4096]", "L").unwrap().len(), 4096);
    }

    #[test]
    fn hostile_lists_are_refused_in_no_time() {
        let long = "a,".repeat(40_000);
        for wrong in [
            "",
            ",",
            "a,",
            "n[",
            "n]",
            "n[1",
            "n[[1]]",
            "n[1]]",
            "n[]",
            "n[,]",
            "n[1-]",
            "n[-1]",
            "n[3-1]",
            "n[1-2-3]",
            "n[a-b]",
            "n[+1]",
            "n[ 1]",
            "n[1-99999999999999999999]",
            "n[0-4096]",
            "n[0-999999999]",
            "n[0-999][0-999]",
            "n[0-63][0-63][0-63][0-63]",
            "n[1-3000],m[1-3000]",
            "a b",
            "a/b",
            "a;b",
            "ä",
            "a\0",
            "$(x)",
            &long,
        ] {
            assert!(hosts(wrong, "L").unwrap_err().is_request(), "{wrong:.40}");
        }
    }

    #[test]
    fn tasks_per_host_are_read_or_refused() {
        for (list, expected) in [("4", &[4][..]), ("2(x3),1", &[2, 2, 2, 1]), ("1,2", &[1, 2])] {
            assert_eq!(tasks_per_host(list, "L").unwrap(), expected, "{list}");
        }
        for wrong in [
            "",
            ",",
            "x",
            "2(x",
            "2(x)",
            "2(x0)",
            "2x3",
            "2(x3",
            "-1",
            "2(x99999999999)",
            "99999(x2)",
            "1(x4096),1(x1)",
        ] {
            assert!(tasks_per_host(wrong, "L").unwrap_err().is_request(), "{wrong}");
        }
    }
}
