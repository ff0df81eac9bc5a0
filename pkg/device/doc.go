// Package device is the vocabulary of the driver: what a GPU is, in which shapes it is offered, and how each shape reads in a ResourceSlice.
//
// A [GPU] is a physical card, as discovery found it. A [Shape] is one way to offer a card to the scheduler; each shape is a type of its own
// ([Whole], [Partition]) and knows its name and its resourceapi.Device. [Offer] turns the GPUs of a node into the devices to publish, in the order in
// which the scheduler's first-fit should meet them, and [Slices] cuts that list to the API's limits.
//
// The package is pure: it reads no file, calls no library and holds no state. The same GPUs always give the same bytes.
//
// Names are stable: they come from the PCI address (with its full domain), never from an index that shifts when a card falls off the bus.
package device
