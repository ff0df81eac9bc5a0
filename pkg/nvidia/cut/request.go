package cut

import (
	"fmt"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// request is one operation on one card, as the plugin sends it to the card's worker.
type request struct {
	Op   operation   `json:"op"`
	Card device.Card `json:"card"`
	On   bool        `json:"on,omitempty"` // wanted MIG or persistence mode
	// Watched means that the health watch has the card open. The worker then reads the MIG mode and
	// does not change it.
	Watched bool             `json:"watched,omitempty"`
	Profile uint32           `json:"profile,omitempty"` // of the GPU instance to create
	At      device.Placement `json:"at"`                // its placement
	// Instance is the GPU instance to create, fill with a compute instance or destroy.
	// opCreateCompute uses only its ID.
	Instance device.Instance `json:"instance,omitzero"`

	ComputeMode device.ComputeMode `json:"computeMode,omitempty"` // wanted mode
	TimeSlice   device.TimeSlice   `json:"timeSlice,omitempty"`   // wanted time slice
}

type operation string

const (
	opLook           operation = "look"
	opSetMode        operation = "set-mode"
	opFabric         operation = "fabric"
	opCreateInstance operation = "create-instance"
	opCreateCompute  operation = "create-compute"
	opDestroy        operation = "destroy"
	opSetComputeMode operation = "set-compute-mode"
	opTimeSlice      operation = "time-slice"
	opSetTimeSlice   operation = "set-time-slice"
	opPersistence    operation = "persistence"
	opSetPersistence operation = "set-persistence"
)

// phrase describes the operation and the GPU for error messages.
func (r request) phrase() string {
	what := map[operation]string{
		opLook:           "read the GPU instances",
		opSetMode:        "switch MIG mode " + map[bool]string{true: "on", false: "off"}[r.On],
		opFabric:         "wait for the NVLink fabric",
		opCreateInstance: fmt.Sprintf("create a GPU instance of profile %d at %d:%d", r.Profile, r.At.Start, r.At.Size),
		opCreateCompute:  fmt.Sprintf("create the compute instance of GPU instance %d", r.Instance.ID),
		opDestroy: fmt.Sprintf("destroy GPU instance %d (profile %d at %d:%d)", r.Instance.ID, r.Instance.ProfileID,
			r.Instance.Placement.Start, r.Instance.Placement.Size),
		opSetComputeMode: fmt.Sprintf("set the compute mode %s", r.ComputeMode),
		opTimeSlice:      "read the time slice",
		opSetTimeSlice:   "set the time slice to " + sliceName(r.TimeSlice),
		opPersistence:    "read the persistence mode",
		opSetPersistence: "switch persistence mode " + map[bool]string{true: "on", false: "off"}[r.On],
	}[r.Op]
	return what + " on " + r.Card.String()
}

func (r request) fail(code device.FailureCode, message string, args ...any) *nvidia.Error {
	return &nvidia.Error{Op: r.phrase(), Code: code, Message: fmt.Sprintf(message, args...)}
}

// answer is the worker's reply to a request.
type answer struct {
	State    device.CardState `json:"state,omitzero"`
	Instance device.Instance  `json:"instance,omitzero"`
	// Waiting says what the NVLink fabric still does to register the card. It is empty when the
	// card is registered or has no fabric.
	Waiting     string           `json:"waiting,omitempty"`
	TimeSlice   device.TimeSlice `json:"timeSlice,omitempty"`
	Persistence bool             `json:"persistence,omitempty"`
	Error       *nvidia.Error    `json:"error,omitempty"`
}
