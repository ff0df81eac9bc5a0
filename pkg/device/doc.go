// Package device is the vocabulary of the driver: what a GPU is, how a node can offer it, and what
// each offered device looks like in a ResourceSlice.
//
// A [GPU] is a physical card as the last scan of the hardware reported it. Its [MIG] field lists
// the profiles that the card supports and the MIG instances that it has. A [Shape] is one way to
// offer a card to the scheduler: as a whole ([Whole]), to a virtual machine ([VFIO]), as a
// partition ([Partition]) or in shares ([Shared]). Each shape has a device name and returns its
// resourceapi.Device. [Decide] chooses in which of these ways one card is offered. [Offer] lists
// the resulting devices of all GPUs of a node, in the order that suits the scheduler's first-fit
// allocation. [Slices] splits that list to fit the API's limits.
//
// Devices of one card may overlap: its [Policy] may offer the whole GPU and every partition at
// once. Shared counters then keep the scheduler from allocating overlapping devices. These counters
// count memory slices by position, engines, and profiles of which the card allows few instances.
// The counters allow exactly what the hardware can hold. Devices use no counters where nothing
// overlaps, or where the cluster does not support counters.
//
// A [Shared] device is a GPU or a partition that several claims may use, as [ShareRules] say. Each
// claim gets a fraction of its memory and compute units, or a plain share, which is only counted.
// The shared device takes the counters of its GPU or partition once, while at least one claim has a
// share. The scheduler accounts for each claim by the capacities published here. Other packages
// enforce the limits.
//
// The package is pure: it reads no file, calls no library and keeps no state. The same GPUs always
// give the same bytes. A partition created for a claim does not change the published devices.
//
// [Signal] is a struct and no sealed interface: the watcher process sends it as JSON, which needs a
// field for each kind anyway.
//
// Device names are stable. They come from the PCI address, with its full domain, and from the
// placement on the card. They never use an index, which shifts when a card falls off the bus, or
// the ID of a MIG instance, which changes when the instance is created again. [Name] is a parsed
// device name.
package device
