package e2e

import (
	"slices"
	"strings"
)

// migIn returns the UUIDs of the MIG devices in the output of nvidia-smi -L, sorted.
func migIn(listing string) []string {
	var uuids []string
	for _, m := range migUUID.FindAllStringSubmatch(listing, -1) {
		uuids = append(uuids, m[1])
	}
	slices.Sort(uuids)
	return uuids
}

func (u tenant) checkOneMIG() {
	u.running("one-mig")
	if seen := u.seesPartitions("one-mig", "mig"); len(seen) != 1 {
		u.t.Errorf("the Pod sees %v, want one MIG device", seen)
	}
}

func (u tenant) checkMIGByMemory() {
	if out := u.says("mig-by-memory"); len(migIn(out)) != 1 || strings.Contains(out, "MIG 1g.10gb ") || strings.Contains(out, "MIG 7g.") {
		u.t.Errorf("the Pod does not see the smallest partition with 15 GiB:\n%s", out)
	}
}

func (u tenant) checkMIGsOfOneGPU() {
	const pod = "migs-of-one-gpu"
	u.running(pod)
	training, inference := u.sh(pod, "training", "nvidia-smi -L"), u.sh(pod, "inference", "nvidia-smi -L")
	if len(migIn(training)) != 1 || len(migIn(inference)) != 2 {
		u.t.Errorf("training sees\n%s\ninference sees\n%s", training, inference)
	}
	seen := slices.Concat(migIn(training), migIn(inference))
	slices.Sort(seen)
	if given := u.migAllocated(pod, "migs"); !slices.Equal(seen, given) {
		u.t.Errorf("the containers see %v, the claim was allocated %v", seen, given)
	}
	parents := append(uuidForm.FindAllString(training, -1), uuidForm.FindAllString(inference, -1)...)
	if len(parents) != 2 || parents[0] != parents[1] {
		u.t.Errorf("the MIG devices are of the GPUs %v, want one", parents)
	}
}

func (u tenant) checkGPUAndMIG() {
	const pod = "gpu-and-mig"
	u.running(pod)
	training, preprocessing := u.sh(pod, "training", "nvidia-smi -L"), u.sh(pod, "preprocessing", "nvidia-smi -L")
	if len(uuidForm.FindAllString(training, -1)) != 1 || len(migIn(training)) != 0 {
		u.t.Errorf("container training does not see one whole GPU:\n%s", training)
	}
	if !slices.Equal(migIn(preprocessing), u.migAllocated(pod, "devices")) {
		u.t.Errorf("container preprocessing does not see one MIG device:\n%s", preprocessing)
	}
}

func (u tenant) checkMIGExtendedResource() {
	if out := u.says("mig-extended-resource"); len(migIn(out)) != 1 {
		u.t.Errorf("the Pod with limits does not see one MIG device:\n%s", out)
	}
}
