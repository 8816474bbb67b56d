//! Norms of the gradient and of the values, layer by layer, for the logs: where a run goes wrong, one of them shows it first.

use std::ops::Range;

use tercio_comm::{CommError, World};
use tercio_engine::{Arena, Device, Layout};

use crate::ranks::RankDevice;
use crate::ranks::parts::Parts;

/// The norms of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerNorms {
    /// Its name: `encoder.block.3`, `shared`.
    pub layer: String,
    /// L2 norm of the gradient, before clipping.
    pub gradient: f64,
    /// L2 norm of the values, after the update.
    pub values: f64,
}

/// The layer of a parameter: its name up to its first number, or without what it ends with.
fn layer_of(name: &str) -> &str {
    let mut at = 0;
    for part in name.split('.') {
        at += part.len();
        if part.bytes().all(|b| b.is_ascii_digit()) {
            return &name[..at];
        }
        at += 1;
    }
    name.rsplit_once('.').map_or(name, |(layer, _)| layer)
}

/// Layers and their places, in the order of the arena.
pub fn layers(layout: &Layout) -> Vec<(String, Range<usize>)> {
    let mut layers: Vec<(String, Range<usize>)> = Vec::new();
    for spec in layout.specs() {
        let (layer, end) = (layer_of(&spec.name), spec.place.start + spec.place.len());
        match layers.last_mut() {
            Some((last, place)) if last == layer => place.end = end,
            _ => layers.push((layer.to_owned(), spec.place.start..end)),
        }
    }
    layers
}

/// Sums of the squares of every layer's gradient, of which a rank may own parts. Where the ranks share the optimizer out, the
/// last digits depend on their number: a figure for people, that nothing rests on.
///
/// # Errors
/// A rank was lost or failed.
pub fn gradient_squares<D: RankDevice>(
    world: &World,
    parts: &Parts,
    device: &D,
    layers: &[(String, Range<usize>)],
    gradients: &Arena<D>,
) -> Result<Vec<f64>, CommError> {
    let of_layer = |(_, layer): &(String, Range<usize>)| {
        let own = parts.own().iter().map(|(part, _)| part.start.max(layer.start)..part.end.min(layer.end));
        let square = |part: Range<usize>| device.dot(gradients.range(part.clone()), gradients.range(part));
        own.filter(|part| !part.is_empty()).map(square).sum()
    };
    let own: Vec<f64> = layers.iter().map(of_layer).collect();
    if !parts.is_split() {
        return Ok(own);
    }
    let all = world.all_gather(&own)?;
    Ok((0..layers.len()).map(|i| all.iter().filter_map(|sums| sums.get(i)).sum()).collect())
}

/// Both norms of every layer.
pub fn norms<D: Device>(
    device: &D,
    layers: &[(String, Range<usize>)],
    gradient_squares: &[f64],
    parameters: &Arena<D>,
) -> Vec<LayerNorms> {
    let of_layer = |((layer, place), square): (&(String, Range<usize>), &f64)| {
        let values = parameters.range(place.clone());
        LayerNorms {
            layer: layer.clone(),
            gradient: square.sqrt(),
            values: device.dot(values, values).sqrt(),
        }
    };
    layers.iter().zip(gradient_squares).map(of_layer).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tercio_engine::Reference;

    #[test]
    fn a_norm_for_each_layer() {
        let mut layout = Layout::default();
        let names = [
            "shared.weight",
            "encoder.block.0.layer.0.q.weight",
            "encoder.block.0.layer.1.wi.weight",
            "encoder.block.10.layer.0.q.weight",
            "encoder.final_layer_norm.weight",
            "plain",
        ];
        for name in names {
            layout.add(name, &[4]);
        }
        let layers = layers(&layout);
        let found: Vec<(&str, Range<usize>)> = layers.iter().map(|(n, p)| (n.as_str(), p.clone())).collect();
        let want = [
            ("shared", 0..4),
            ("encoder.block.0", 4..12),
            ("encoder.block.10", 12..16),
            ("encoder.final_layer_norm", 16..20),
            ("plain", 20..24),
        ];
        assert_eq!(found, want);
        let (mut g, mut p) = (Arena::zeros(&Reference, &layout), Arena::zeros(&Reference, &layout));
        Reference.fill(g.range_mut(4..12), 0.5);
        Reference.fill(p.all_mut(), 2.0);
        let world = World::alone();
        let parts = Parts::new::<Reference>(&world, &layout, false);
        let squares = gradient_squares(&world, &parts, &Reference, &layers, &g).unwrap();
        assert_eq!(squares, [0.0, 2.0, 0.0, 0.0, 0.0]);
        let norms = norms(&Reference, &layers, &squares, &p);
        assert_eq!((norms[1].gradient, norms[1].values), (2f64.sqrt(), 32f64.sqrt()));
    }
}
