// Package metadata writes the files in which a container finds out which devices a claim gave it,
// in the form of KEP-5304 (k8s.io/dynamic-resource-allocation/api/metadata). KubeVirt reads them,
// and package devicemetadata of that module reads them for any Go program.
//
// There is one file for each request of a claim. It has the same data once for each API version.
// A claim's CDI spec mounts the file. All files are in one directory, because to create and remove
// one for each claim took longer than everything else.
//
// The kubelet plugin library can write such files too, but not as the driver's promises need it:
//   - If a write fails, the library only logs it, and the container starts without the file.
//   - Its directories have the claim's name, so a late Unprepare removes the files of a new claim
//     of that name. Here the files have the claim's UID.
//   - It searches the whole CDI directory at each Unprepare, and writes after the claim's lock is
//     released. So an Unprepare meanwhile leaves the files for ever.
//   - It writes a partition's UUID only in Prepare, although the partition may be created again.
//
// Package prepare writes and removes these files with the claim's CDI spec, under the same lock. So
// what it says about failures, crashes and repairs of the spec is true of them as well.
package metadata
