package steps

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
)

// Creator is a step that creates a partition: a [MIGInstance] for one claim, or a [Shared] that
// wraps one.
type Creator interface {
	Step
	// Partition returns the name under which the partition is allocated.
	Partition() string
	// MIG returns the step that creates the partition. It is nil for a Shared whose state is not
	// loaded.
	MIG() *MIGInstance
	// Load reads the state that claims share from its file, if the step is shared.
	Load(records *checkpoint.Store, bootID string) error
	// Recreate reverts the step and applies it again. Between the two it calls ready, which may change
	// the step, or return an error and so leave the partition away.
	Recreate(ctx context.Context, env *Env, ready func(*MIGInstance) error) error
}

// AsCreator returns the step as a Creator. It returns false if the step creates no partition.
func AsCreator(s Step) (Creator, bool) {
	if shared, ok := s.(*Shared); ok {
		of, kind := SplitKey(shared.Key)
		_, known := device.ParseName(of)
		return shared, known && kind == MIGInstanceKind
	}
	c, ok := s.(Creator)
	return c, ok
}

// CheckDeviceNode returns an error if the GPU's device node changed: known is its minor number in
// the inventory, now the number that the hardware has. Changing the MIG mode may renumber the
// device nodes.
func CheckDeviceNode(gpu string, known, now int) error {
	if known == now {
		return nil
	}
	return cause.Errorf(cause.NotReady,
		"the device node of %s changed from /dev/nvidia%d to /dev/nvidia%d: the inventory notices within seconds, and the kubelet retries",
		gpu, known, now)
}

// SameInstance reports whether known and there are the same GPU instance. The GPU reuses IDs, and
// MIG UUIDs are computed from the card, the ID and the place on the chip, so a recreated instance
// may look the same. If one of the two has no compute instance, it is half created or half removed,
// so only ID, profile and placement are compared.
func SameInstance(known, there device.Instance) bool {
	if known.ID != there.ID || known.ProfileID != there.ProfileID || known.Placement != there.Placement {
		return false
	}
	return len(known.Compute) == 0 || len(there.Compute) == 0 || slices.EqualFunc(known.Compute, there.Compute, SameCompute)
}

// SameCompute reports whether a and b are the same compute instance.
func SameCompute(a, b device.ComputeInstance) bool { return a.ID == b.ID && a.UUID == b.UUID }

// Overlapping returns the instances whose placement overlaps with the parameter "at".
func Overlapping(instances []device.Instance, at device.Placement) []device.Instance {
	var there []device.Instance
	for _, in := range instances {
		if in.Placement.Overlaps(at) {
			there = append(there, in)
		}
	}
	return there
}

// DescribeInstances formats instances for messages, with the IDs and placements that nvidia-smi mig
// -lgi shows.
func DescribeInstances(instances ...device.Instance) string {
	texts := make([]string, len(instances))
	for i, in := range instances {
		texts[i] = fmt.Sprintf("GPU instance %d (profile %d, placement %d:%d", in.ID, in.ProfileID, in.Placement.Start, in.Placement.Size)
		for _, c := range in.Compute {
			texts[i] += ", " + c.UUID
		}
		texts[i] += ")"
	}
	return strings.Join(texts, ", ")
}
