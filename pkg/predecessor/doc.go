// Package predecessor reads the checkpoint of NVIDIA's DRA driver
// (kubernetes-sigs/dra-driver-nvidia-gpu) on a node that this driver takes over. The checkpoint is
// the file checkpoint.json in the plugin directory. Both drivers use that directory, because they
// have the same name.
//
// The checkpoint lists the claims that NVIDIA's DRA driver prepared and did not unprepare. Their
// Pods may still run, so other claims must not get their devices until these claims end. The
// scheduler knows the devices by names that this driver does not use. The package returns the
// claims, and the devices that the checkpoint identifies.
//
// The package never changes the content of the checkpoint. It notes ended claims in files next to
// this driver's own files. When all claims have ended, it renames the checkpoint, so that neither
// driver reads it again.
//
// A user may go back to NVIDIA's DRA driver and come here again. By then that driver may have
// prepared an ended claim once more, or only rewritten the file. So a note is about one preparation
// (see [Claim]). Where the checkpoint cannot tell, the claim counts as not ended.
//
// A checkpoint that cannot be read, or has a later version, may list any claim. Then the package
// returns an [UnreadableError], and the caller withholds every GPU.
package predecessor
