//! What rounds cost: by a table, and by what real rounds say of it.

#[allow(dead_code)]
mod race;

use aquila_spec::policy::{CostTable, RoundCosts};
use race::tables;

fn h200() -> CostTable {
    tables()[1].1.clone()
}

#[test]
fn a_table_between_its_points_is_their_straight_line_and_beyond_them_grows_in_proportion() {
    let table = CostTable::from_json(
        r#"{"key": "", "batches": [1, 3], "nodes": [1, 5], "verify": [[1, 3], [2, 6]],
            "steps": [1, 3], "topk": [1, 2], "draft": [[[1, 2], [3, 4]], [[1, 2], [5, 6]]]}"#,
    )
    .unwrap();
    assert_eq!([table.verify(1.0, 3.0), table.verify(2.0, 1.0)], [2.0, 1.5]);
    assert_eq!([table.verify(2.0, 3.0), table.verify(1.0, 10.0)], [3.0, 6.0]);
    assert_eq!([table.verify(6.0, 1.0), table.verify(0.5, 0.5)], [4.0, 1.0]);
    assert_eq!(
        [table.draft(1.0, 0, 1), table.draft(1.0, 2, 1), table.draft(2.0, 3, 2)],
        [0.0, 2.0, 5.0]
    );
    // Two requests of which one has a second level: level 1 for both, level 2 for one.
    let costs = RoundCosts::new(table);
    assert_eq!(costs.round(2, 5, &[2, 1], 1), costs.table().verify(2.0, 2.5) + 1.0 + 1.0);
}

#[test]
fn a_broken_table_says_what_is_wrong() {
    let error = |text: &str| CostTable::from_json(text).unwrap_err().to_string();
    let table = |batches: &str, verify: &str| {
        format!(
            r#"{{"key": "k", "batches": {batches}, "nodes": [1], "verify": {verify}, "steps": [1],
                "topk": [1], "draft": [[[1.0]]]}}"#
        )
    };
    assert!(error(&table("[]", "[[1.0]]")).contains("batches must ascend from at least 1, not []"));
    assert!(error(&table("[1, 2]", "[[1.0]]")).contains("lengths of their axes"));
    assert!(error(&table("[1]", "[[0.0]]")).contains("above 0 for verify"));
    assert!(error("{").contains("the cost table is not valid JSON"));
}

#[test]
fn real_rounds_correct_the_table_and_outliers_hardly_do() {
    let mut costs = RoundCosts::new(h200());
    let said = costs.round(8, 32, &[8, 8, 8], 1);
    for _ in 0..40 {
        costs.refine((8, 32), &[8, 8, 8], 1, said);
    }
    costs.refine((8, 32), &[8, 8, 8], 1, said * 100.0);
    assert!(costs.round(8, 32, &[8, 8, 8], 1) < said * 1.03);
    for _ in 0..300 {
        costs.refine((8, 32), &[8, 8, 8], 1, said * 1.5);
    }
    let now = costs.round(8, 32, &[8, 8, 8], 1) / said;
    assert!((now - 1.5).abs() < 0.02, "{now}");
}

#[test]
fn a_machine_that_became_slower_is_so_for_rounds_that_are_not_run_and_a_wrong_table_is_told_apart()
{
    let mut costs = RoundCosts::new(h200());
    let (trees, plain) = (costs.round(8, 32, &[8, 8, 8], 1), costs.plain(8));
    let ratio = trees / plain;
    let now = |costs: &RoundCosts| costs.round(8, 32, &[8, 8, 8], 1) / costs.plain(8);
    // However long only trees are run, nearly all is the machine's.
    for _ in 0..2000 {
        costs.refine((8, 32), &[8, 8, 8], 1, trees * 1.3);
    }
    assert!((now(&costs) / ratio - 1.0).abs() < 0.04, "{}", now(&costs) / ratio);
    assert!((costs.plain(8) / plain - 1.3).abs() < 0.06, "{}", costs.plain(8) / plain);
    // Where both are run, the trees turn out to be what is slower. The first rounds after others
    // unlike them do not count, whatever they take.
    for _ in 0..20 {
        for at in 0..20 {
            costs.refine((8, 32), &[8, 8, 8], 1, trees * if at < 6 { 2.0 } else { 1.3 });
        }
        for at in 0..11 {
            costs.refine((8, 8), &[], 1, plain * if at < 6 { 2.0 } else { 1.0 });
        }
    }
    assert!((now(&costs) / ratio - 1.3).abs() < 0.02, "{}", now(&costs) / ratio);
}

#[test]
fn returns_among_plain_rounds_are_priced_by_what_they_took() {
    let mut costs = RoundCosts::new(tables()[0].1.clone());
    let once = |costs: &RoundCosts| costs.returning(1, [1].into_iter());
    let said = once(&costs);
    assert_eq!(costs.returning(1, [0, 0].into_iter()), 0.0, "who missed nothing does not return");
    // By hand: three times as long, against the table's word, which counts for two returns.
    costs.refine_return(said, 3.0 * said);
    assert!((once(&costs) - said * (1.0 + 2.0 / 3.0)).abs() < 1e-12);
    for _ in 0..100 {
        let expected = once(&costs);
        costs.refine_return(expected, 3.0 * said);
    }
    assert!((once(&costs) / said - 3.0).abs() < 0.02, "{}", once(&costs) / said);
    // It is not forgotten that more rows take longer.
    let rows = |costs: &RoundCosts| costs.returning(1, [9].into_iter()) - once(costs);
    assert!((rows(&costs) - rows(&RoundCosts::new(tables()[0].1.clone()))).abs() < 1e-12);
}
