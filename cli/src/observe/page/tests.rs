//! Pages of made-up calls: every page is well-formed, holds its numbers exactly, and no text of
//! another rank escapes.

use kyklos::plan::ProvedPlans;
use kyklos::{AttentionProblem, Dtype, Mesh, PlacementKind, Split, Strategy, plan_forward};
use roxmltree::{Document, Node, ParsingOptions};

use super::model::{Budget, Kind, Origin, Page, RankFigures, Segment, Timeline, TimelineRow, Times, Traffic};
use super::{html, page_of_plans};

/// Parses a page strictly, as XML: attributes quoted, elements closed, ids unique, links to ids
/// that exist.
fn parse(page: &str) -> Document<'_> {
    let options = ParsingOptions { allow_dtd: true, ..ParsingOptions::default() };
    let document = Document::parse_with_options(page, options).unwrap_or_else(|error| {
        let line = page.lines().nth(error.pos().row as usize - 1).unwrap_or_default();
        panic!("{error}: {}", line.chars().take(200).collect::<String>())
    });
    let mut ids = std::collections::BTreeSet::new();
    for id in document.descendants().filter_map(|node| node.attribute("id")) {
        assert!(ids.insert(id), "{id} is there twice");
    }
    for node in document.descendants() {
        if let Some(href) = node.attribute("href") {
            assert!(href.strip_prefix('#').is_some_and(|id| ids.contains(id)), "{href}");
        }
        // Nothing runs, and nothing is loaded.
        assert!(
            !["script", "link", "img", "iframe", "object", "use", "image"].contains(&node.tag_name().name())
        );
        for attribute in node.attributes() {
            assert!(!attribute.name().starts_with("on") && attribute.name() != "src", "{attribute:?}");
        }
    }
    document
}

/// Void elements as XML wants them.
fn as_xml(html: &str) -> String {
    html.split_inclusive('>')
        .map(|part| match part.rfind("<meta ") {
            Some(_) => format!("{}/>", part.trim_end_matches('>')),
            None => part.to_owned(),
        })
        .collect()
}

fn section<'a>(document: &'a Document<'_>, id: &str) -> Node<'a, 'a> {
    let found = document.descendants().find(|node| node.attribute("id") == Some(id));
    found.unwrap_or_else(|| panic!("no section {id}"))
}

fn text(node: Node<'_, '_>) -> String {
    node.descendants().filter_map(|node| node.text()).collect::<Vec<_>>().join(" ")
}

/// The exact numbers in the rows of the first table of a section.
fn numbers(document: &Document<'_>, id: &str) -> Vec<Vec<String>> {
    let table = section(document, id).descendants().find(|node| node.has_tag_name("tbody")).expect("a table");
    let rows = table.children().filter(|node| node.has_tag_name("tr"));
    rows.map(|row| {
        let data = row.descendants().filter(|node| node.has_tag_name("data"));
        data.filter_map(|node| node.attribute("value").map(str::to_owned)).collect()
    })
    .collect()
}

fn planned(mesh: Mesh, tokens: u32, placement: PlacementKind, strategy: Strategy) -> Page {
    let mask = "causal".parse().expect("a mask");
    let problem = AttentionProblem::new([1, tokens, 8, 2, 16], Dtype::F32, mask).expect("a problem");
    let set = plan_forward(&problem, mesh, placement, &Split::Even, strategy).expect("plans");
    page_of_plans(&ProvedPlans::new(set).expect("a proof"), &[])
}

fn ring(ranks: u32, tokens: u32) -> Page {
    planned(Mesh::new(1, ranks).expect("a mesh"), tokens, PlacementKind::Contiguous, Strategy::Ring)
}

/// The page of a run with these numbers, in which rank 1 waits for rank 0.
fn measured(ranks: u32, segments: usize) -> Page {
    let mut page = ring(ranks, ranks * 8);
    let mut rows = Vec::new();
    for (index, rank) in (0_i64..).zip(&mut page.ranks) {
        rank.device = "cpu <b>&\"'".to_owned();
        #[expect(clippy::cast_precision_loss, reason = "small")]
        let extra = index as f64 / 1e4;
        rank.times =
            Some(Times { compute_s: 0.0123 + extra, wait_s: 0.02 * extra, copy_s: 0.001, wall_s: 0.041 });
        rank.predicted = Some(Times { compute_s: 0.011, ..Times::default() });
        rank.budget = Some(Budget { bytes: 1 << 30, shared_by: 2 });
        let segment = |at: usize| {
            let at = at as i64 * 100 + index;
            Segment::one(if at % 3 == 0 { Kind::Wait } else { Kind::Compute }, (at, at + 90), HOSTILE)
        };
        rows.push(TimelineRow {
            waited_for: vec![(0, 50)],
            ..TimelineRow::merged((0..segments).map(segment).collect(), ranks)
        });
    }
    page.ranks[1].times = Some(Times { compute_s: 0.01, wait_s: 0.01558, copy_s: 0.0, wall_s: 0.041 });
    Page {
        origin: Origin::Measured,
        title: format!("Attention {HOSTILE}"),
        alerts: vec![HOSTILE.to_owned()],
        facts: vec![("problem", HOSTILE.to_owned())],
        wall_s: Some(0.041),
        predicted_s: Some(0.05),
        timeline: Some(Timeline { rows }),
        json: format!("{{\"device\": {HOSTILE:?}}}"),
        ..page
    }
}

const HOSTILE: &str =
    "</title></style></pre>]]>--><script>alert(1)</script><img src=x onerror=\"alert(2)\">' & \u{202e}";

#[test]
fn a_page_is_well_formed_and_names_every_rank_in_every_section() {
    for page in [ring(3, 100), ring(20, 400), measured(3, 50), measured(30, 20)] {
        let xml = as_xml(&html(&page));
        let document = parse(&xml);
        let ids = if page.timeline.is_some() {
            &["mask", "timeline", "ranks", "memory"][..]
        } else {
            &["mask", "ranks", "memory"]
        };
        for id in ids {
            let named = text(section(&document, id));
            let words: Vec<&str> = named.split_whitespace().collect();
            for rank in &page.ranks {
                assert!(words.contains(&&rank.rank.to_string()[..]), "{id}: rank {} is not there", rank.rank);
            }
        }
    }
}

#[test]
fn the_strict_parser_refuses_what_is_not_well_formed() {
    for bad in ["<p>a", "<p a=b>c</p>", "<p>a & b</p>", "<b><i></b></i>", "<p>a < b</p>"] {
        assert!(Document::parse(bad).is_err(), "{bad}");
    }
}

#[test]
fn no_text_becomes_an_element() {
    let xml = as_xml(&html(&measured(3, 5)));
    let document = parse(&xml);
    let texts = text(document.root_element());
    assert!(
        texts.contains("<script>alert(1)</script><img src=x onerror=\"alert(2)\">"),
        "the text itself is shown"
    );
}

#[test]
fn exact_numbers_are_in_the_table_of_ranks() {
    let page = measured(3, 5);
    let xml = as_xml(&html(&page));
    let rows = numbers(&parse(&xml), "ranks");
    for (row, rank) in rows.iter().zip(&page.ranks) {
        let RankFigures { queries, bytes_sent, messages_sent, peak_bytes, times, .. } = rank;
        let Times { compute_s, wait_s, copy_s, .. } = times.expect("times");
        let share = wait_s / 0.041;
        let expected = [
            queries.to_string(),
            compute_s.to_string(),
            wait_s.to_string(),
            copy_s.to_string(),
            share.to_string(),
            bytes_sent.to_string(),
            messages_sent.to_string(),
            peak_bytes.to_string(),
        ];
        assert_eq!(row[..], expected);
    }
}

#[test]
fn the_summary_names_the_rank_that_waited_and_what_for() {
    let summary = |page: &Page| super::words::summary(page);
    assert_eq!(
        summary(&measured(3, 5)),
        "3 ranks finished in 41.0 ms; rank 1 waited 38 % of that time, for rank 0."
    );
    let mut page = measured(3, 5);
    page.ranks.iter_mut().for_each(|rank| rank.times = Some(Times { compute_s: 0.04, ..Times::default() }));
    assert_eq!(summary(&page), "3 ranks finished in 41.0 ms; no rank waited for more than 5 % of that time.");
    assert_eq!(summary(&measured(3, 5)).matches("rank 0").count(), 1);
    let page = ring(2, 64);
    assert_eq!(
        summary(&page),
        "2 ranks; rank 1 has the most work, 1.49 times the mean; a rank sends at most 8.0 KiB."
    );
}

#[test]
fn traffic_of_a_ring_goes_to_the_next_rank_and_adds_up() {
    let page = ring(3, 96);
    let sent = |rank: u32| page.traffic.iter().filter(|t| t.from == rank).map(|t| t.bytes).sum::<u64>();
    for rank in &page.ranks {
        assert_eq!(sent(rank.rank), rank.bytes_sent);
    }
    // Under a causal mask, the keys of the last rank are of no use to the others.
    let hops = page.traffic.iter().map(|Traffic { from, to, messages, .. }| (*from, *to, *messages));
    assert_eq!(hops.collect::<Vec<_>>(), [(0, 1, 1), (1, 2, 2)]);
    // Half of the pairs of 96 tokens and the diagonal, for each of 8 heads.
    let pairs: f64 = page.ranks.iter().map(|rank| rank.pairs).sum();
    assert_eq!(pairs, f64::from(8 * 96 * 97 / 2));
}

#[test]
fn a_page_of_200_ranks_or_of_100_000_events_stays_small() {
    let wide = html(&measured(200, 500));
    assert!(wide.len() < 3 << 20, "{} bytes", wide.len());
    parse(&as_xml(&wide));
    assert!(wide.contains("are shares of time"));
    let long = html(&measured(2, 50_000));
    assert!(long.len() < 1 << 20, "{} bytes", long.len());
    let dealt =
        html(&planned(Mesh::new(4, 16).expect("a mesh"), 64 * 64, PlacementKind::Zigzag, Strategy::Unified));
    assert!(dealt.len() < 1 << 20, "{} bytes", dealt.len());
}
