//! The one list of families, held against what the parts can do. The parts in Python have a test of their own.

use dflop_types::{FAMILIES, FamilyRecord};
use std::collections::BTreeSet;

fn those(can: impl Fn(&FamilyRecord) -> bool) -> BTreeSet<&'static str> {
    FAMILIES.iter().filter(|family| can(family)).map(|family| family.model_type).collect()
}

#[test]
fn the_list_says_what_the_parts_can_do() {
    let shapes: BTreeSet<_> = dflop_data::family::known().into_iter().collect();
    assert_eq!(those(|family| family.has_shapes), shapes);
    let estimates: BTreeSet<_> = dflop_analytic::FAMILIES.into_iter().collect();
    assert_eq!(those(|family| family.has_estimate), estimates);
}
