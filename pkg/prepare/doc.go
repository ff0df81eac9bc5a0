// Package prepare makes a claim's devices usable, and takes them back, in one transaction.
//
// A preparation is a list of steps, such as creating a MIG instance. Each step has an Apply
// and an idempotent Revert. The list is in the claim's record on disk before the first step
// runs. After the last step the record says "Prepared". Unprepare reverts the recorded steps in
// reverse order and removes the record. Recovery after a crash does the same with an unfinished
// record. There is no other path.
//
// What the package promises:
//   - If Prepare succeeds, it has verified in that call that device nodes, mount sources, CDI
//     specs, the record and partitions exist.
//   - A repeated Prepare verifies them again and repairs them.
//   - What the node says about a device counts when Prepare has all locks. So a GPU that is lost
//     while Prepare waits is refused, unless the claim has it.
//   - While one claim uses a device for itself, every other claim is refused after a short wait
//     without locks. The error names the claim that uses the device.
//   - If a claim comes with another allocation, Prepare first gives the old devices back.
//   - Unprepare needs no GPU driver unless the claim's steps changed hardware.
//   - Calls for one claim run one after another. Calls for different GPUs run concurrently.
//   - No state stays in memory between calls, so two instances of the plugin cannot disagree.
//
// # Partitions
//
// A partition is created when its claim is prepared and removed when the claim is unprepared. Both
// go through [steps.Partitions]. The record has the intent of each hardware call before the call,
// and its result after it.
//
// This driver owns a MIG instance only if a record of this boot proves that it created the
// instance. Once the record has the ID of the GPU instance, the ID, the profile and the placement
// prove it, and with a compute instance also the MIG device's UUID. Before that, after an
// interrupted creation, the driver owns an instance that has exactly the planned profile and
// placement, did not exist before, and is still empty. Every other MIG instance is foreign. A claim
// may use a foreign instance that was allocated to it, but the driver never changes the instance.
//
// Another package decides which partitions the ResourceSlices list. This package creates and
// restores what a claim was allocated, whatever the policy is by then.
//
// The hardware forgets partitions at a reboot, a driver reload and a GPU reset. The next Prepare or
// Reconcile (see package reconcile) creates a lost partition again at its placement. If that is
// impossible, it removes the claim's CDI spec. Then the claim's containers fail to start and never
// get another device.
//
// # Sharing
//
// Several claims can share time slices, a compute mode, an MPS daemon or a partition. The step that
// provides one of these has a holder file with the original state (see [checkpoint.Holder]). The
// first claim applies the step. A further claim joins if it wants the same value, and is otherwise
// refused with the names of the others. The last claim that ends restores the original state.
//
// The claims' records of this boot say which claims share a step. They name it before it is
// applied, so a claim that ends has nothing to write, which a full disk would refuse. An unreadable
// record counts for all steps that claims with its devices can share, until it is quarantined.
//
// While claims share a step, every repeated Prepare and every Reconcile checks its effect and
// applies the step again if needed. The NVIDIA driver forgets settings at a reload and at a reset.
// Without persistence mode it may also forget them when the last process closes the GPU.
//
// If a holder file is unreadable, no claim can join. The last claim whose record names the file
// resets the hardware to its default when it leaves. If no record names the file, Reconcile does
// that. Reconcile also stops MPS daemons without a holder file.
//
// A claim can end even if its time slice cannot be restored. The holder file then stays without
// claims, and Reconcile tries again.
//
// A fraction is a share with a limited part of a device's memory and compute. Its limits are in the
// environment of its containers and apply to each process. Where the GPU supports it, further edits
// limit a container as a whole (see [Edits].MemoryLimit).
//
// # Whole GPUs
//
// A Prepare of whole GPUs uses the inventory and reads no hardware, with two exceptions. If a GPU's
// MIG mode may be enabled, by the inventory or by a mark of this driver on disk, Prepare reads the
// GPU and disables the mode. For a virtual machine it also binds the GPU to VFIO. A claim that does
// not share its devices costs no hardware access and no file for sharing.
package prepare
