package steps

import (
	"time"

	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
)

// Node is what the steps of all claims work on: the node's hardware and the stores on its disk.
type Node struct {
	BootID  string
	Now     func() time.Time
	Records *checkpoint.Store
	Specs   Specs
	// Hardware has the inventory, which may be out of date.
	Hardware   Hardware
	Partitions Partitions
	MPS        Daemons
}

// Env is what the steps of one claim need to run, in one call.
type Env struct {
	Node
	ClaimUID        types.UID
	Namespace, Name string
	// Cards caches the state of the cards during the call.
	Cards *CardStates
	// Journal saves the current state of the steps: in the claim's record, or in the separate file of
	// a setting, partition or daemon that several claims share.
	Journal func() error
	// EarlierBoot means that the record was written in an earlier boot, so that its partitions no
	// longer exist.
	EarlierBoot bool
	// UUID returns the UUID of the claim's device with this name.
	UUID func(device string) (string, error)
	// Pass is the Reconcile pass in which the steps run. It is nil outside Reconcile.
	Pass *Pass
}

// NewEnv returns the environment in which the steps of record r run. Its Journal function saves the
// steps' current state in the record.
func NewEnv(node Node, r *checkpoint.Record, steps []Step) *Env {
	return &Env{
		Node: node, ClaimUID: r.ClaimUID, Namespace: r.Namespace, Name: r.Name, Cards: NewCardStates(node.Partitions),
		Journal: func() error {
			stored, err := Encode(steps)
			if err == nil {
				r.Steps = stored
				err = node.Records.Save(*r)
			}
			if err != nil {
				return cause.Wrap(cause.Record, err)
			}
			return nil
		},
		EarlierBoot: r.BootID != node.BootID,
	}
}

// Specs stores the CDI specs that the container runtime reads.
type Specs interface {
	WriteBase(edits specs.ContainerEdits) error
	WriteClaim(uid types.UID, devices []cdi.ClaimDevice) error
	RemoveClaim(uid types.UID) error
	Claims() ([]types.UID, error)
}

// Hardware returns the inventory of the node's GPUs. Its implementation must not access a GPU.
type Hardware interface {
	Snapshot() inventory.Snapshot
}

// mayBePresent reports whether the card may still be in the node. It does not use Snapshot.Ready: a
// node without cards is never ready, and a failed scan keeps the last result.
func mayBePresent(s inventory.Snapshot, card device.Card) bool {
	for _, g := range s.Node.GPUs {
		if g.Card() == card {
			return true
		}
	}
	return !s.Known
}

// isCardGone reports whether err, which a call to the card returned, means that the card was
// replaced or has lost its state.
func (e *Env) isCardGone(card device.Card, err error) bool {
	switch FailureCode(err) {
	case device.FailureReplaced, device.FailureNoDriver:
		return true
	case device.FailureNotFound, device.FailureLost:
		// A card that fell off the bus gives these errors until the node reboots. The reboot clears the
		// card's state.
		return !mayBePresent(e.Hardware.Snapshot(), card)
	}
	return false
}

// NotReady returns the error for a claim when the inventory is not ready. It includes the
// inventory's reason.
func NotReady(s inventory.Snapshot) error {
	reason := s.Reason
	if reason == "" {
		reason = "the node's devices are not known yet"
	}
	return cause.Errorf(cause.NotReady, "the node is not ready: %s", reason)
}
