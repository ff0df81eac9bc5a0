// Package device is the vocabulary of the driver: what a GPU is, in which shapes it is offered, and how each shape reads in a ResourceSlice.
//
// A [GPU] is a physical card, as discovery found it; its [MIG] says what it can be cut into and how it is cut. A [Shape] is one way to offer a card to the
// scheduler; each shape is a type of its own ([Whole], [Partition], [Shared]) and knows its name and its resourceapi.Device. [Decide] settles in which shapes a
// card is offered, [Offer] lists them for all GPUs of a node, in the order in which the scheduler's first-fit should meet them, and [Slices] cuts that list to
// the API's limits.
//
// Shapes of one card may overlap: a whole and every partition at once, as the [Policy] says. What
// keeps them apart are shared counters, from which the scheduler subtracts what it gives away:
// memory slices by position, engines, and profiles of which the card allows only so many. Where
// counters allow something, the hardware can hold it, and the other way round. Where nothing
// overlaps, or the cluster keeps no counters, nothing is counted.
//
// A [Shared] device is a GPU or a partition that several claims may hold, where [ShareRules] say so: in fractions of its memory and compute units, or in plain
// shares, which are only counted. It takes the counters of what it is made of, once for as long as somebody holds a share. How much each claim holds is the
// scheduler's account, by the capacities that are published here; that nobody uses more is for others to see to.
//
// The package is pure: it reads no file, calls no library and holds no state. The same GPUs always give the same bytes, and a partition that is cut for a
// claim changes none of them.
//
// Names are stable: they come from the PCI address (with its full domain) and from the place on the card, never from an index that shifts when a card falls
// off the bus, nor from an instance that may have to be made again. A [Name] is what they say.
package device
