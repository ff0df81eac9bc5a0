package checkpoint

import (
	"encoding/json"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
)

// State is the progress of a claim's preparation.
type State string

const (
	// Preparing means that some or all of the record's Steps may have been carried out. If the call
	// was interrupted, all of them must be undone.
	Preparing State = "Preparing"
	// Prepared means that all of the record's Steps were carried out. The kubelet may already have the
	// result of the call.
	Prepared State = "Prepared"
	// Reverting means that the claim is being unprepared and some Steps may be undone already.
	Reverting State = "Reverting"
)

// Record is what the driver must remember about a claim across a crash or a reboot.
type Record struct {
	ClaimUID  types.UID `json:"claimUID"`
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	// Pod is the name of the Pod that owns the claim. It is empty for a claim that no Pod owns, which
	// several Pods may use one after another.
	Pod   string `json:"pod,omitempty"`
	State State  `json:"state"`
	// BootID is the kernel's boot ID when the record's Steps were carried out. After a reboot their
	// effects on the hardware and in tmpfs are gone.
	BootID  string   `json:"bootID"`
	Devices []Device `json:"devices"`
	// Steps are the parts of the claim's preparation, such as creating a MIG instance, in the order in
	// which the driver carries them out. It undoes them in reverse order.
	Steps []Step `json:"steps"`
}

// Device is one device that was allocated to the claim.
type Device struct {
	Request     string     `json:"request"`
	Pool        string     `json:"pool"`
	Device      string     `json:"device"`
	ShareID     *types.UID `json:"shareID,omitempty"`
	AdminAccess bool       `json:"adminAccess,omitempty"`
	// GPU is the name of the GPU that provides the device. The name contains the PCI address.
	GPU string `json:"gpu"`
	// GPUUUID is the UUID of that GPU when the claim was prepared. If the GPU there has another UUID
	// now, the card was replaced.
	GPUUUID string `json:"gpuUUID"`
	// Model is that GPU's product, memory and MIG profiles when the claim was prepared, as package
	// device writes them. It is empty if they were unknown. After a reboot the claim can have another
	// card of the same Model.
	Model string `json:"model,omitempty"`
	// Binding identifies the binding of that GPU to NVIDIA's driver when the claim's CDI spec was
	// written. With another one the GPU's device nodes may have other numbers.
	Binding string `json:"binding,omitempty"`
	// MIGUUID is the UUID of the partition's MIG device. It is empty for a whole GPU.
	MIGUUID string `json:"migUUID,omitempty"`
	// Fraction means that the device is a share with a limited part of the GPU's memory and compute. A
	// share without Fraction has no limit.
	Fraction bool `json:"fraction,omitempty"`
	// ConsumedCapacity is how much of each capacity of the device the claim's share takes. It is nil
	// for an exclusive device.
	ConsumedCapacity map[string]resource.Quantity `json:"consumedCapacity,omitempty"`
}

// Step is one part of a claim's preparation, such as creating a MIG instance, in the form in which
// the record stores it. Package prepare carries it out.
type Step struct {
	Kind string `json:"kind"`
	// Params are the step's parameters. Their form depends on Kind.
	Params json.RawMessage `json:"params"`
}

// ClaimRef names a claim. Namespace and Name are empty if its record is unreadable.
type ClaimRef struct {
	UID             types.UID
	Namespace, Name string
}

func (c ClaimRef) String() string {
	if c.Name == "" {
		return fmt.Sprintf("with UID %s, whose record cannot be read", c.UID)
	}
	return fmt.Sprintf("%s/%s (UID %s)", c.Namespace, c.Name, c.UID)
}

// Claim names the record's claim.
func (r Record) Claim() ClaimRef { return ClaimRef{r.ClaimUID, r.Namespace, r.Name} }

// OccupiedDevices returns the names of the claim's devices, each once, in the order of Devices.
// Devices with admin access are left out: they stay free for other claims.
func (r Record) OccupiedDevices() (names []string) {
	for _, d := range r.Devices {
		if !d.AdminAccess && !slices.Contains(names, d.Device) {
			names = append(names, d.Device)
		}
	}
	return names
}

// GPUs returns the names of the GPUs of the claim's devices, each once. Devices with admin access
// are left out.
func (r Record) GPUs() (names []string) {
	for _, d := range r.Devices {
		if !d.AdminAccess && !slices.Contains(names, d.GPU) {
			names = append(names, d.GPU)
		}
	}
	return names
}
