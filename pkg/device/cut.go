package device

// Card names the GPU that a cut is about. It is found by its place; another UUID there is another card, which is not touched.
type Card struct {
	PCIAddress PCIAddress `json:"pciAddress"`
	UUID       string     `json:"uuid"`
}

func (c Card) String() string { return c.PCIAddress.WholeName() + " (" + c.UUID + ")" }

// Card names the GPU to whom cuts it.
func (g GPU) Card() Card { return Card{PCIAddress: g.PCIAddress, UUID: g.UUID} }

// CutState is how a card is cut at the moment when it was asked.
type CutState struct {
	// Minor is N of /dev/nvidiaN: it is read again, because a change of the MIG mode may change it.
	Minor int `json:"minor"`
	// MIG has Enabled, Pending and Instances; what the model could be cut into is the inventory's to know.
	MIG MIG `json:"mig"`
	// ComputeMode is empty where the driver does not say.
	ComputeMode ComputeMode `json:"computeMode,omitempty"`
	// Persistence is nil where the driver does not say. Where it is off, the driver forgets compute mode and time slices when the last process closes the GPU.
	Persistence *bool `json:"persistence,omitempty"`
}

// CutCode says why the hardware did not do what it was asked.
type CutCode string

const (
	CutInUse        CutCode = "in-use"         // something has the GPU or the instance open
	CutInsufficient CutCode = "insufficient"   // the place is taken
	CutNotFound     CutCode = "not-found"      // the GPU, the profile or the instance is not there
	CutNotSupported CutCode = "not-supported"  // this GPU, driver or guest cannot be cut, or not so
	CutNoPermission CutCode = "no-permission"  // the plugin lacks a right
	CutReset        CutCode = "reset-required" // the MIG mode changes with the next reset of the GPU only; nothing was changed
	CutNoDriver     CutCode = "no-driver"      // the kernel driver is not loaded: then there are no instances either
	CutLost         CutCode = "lost"           // the GPU does not answer any more
	CutReplaced     CutCode = "replaced"       // another card is at the place
	CutChanged      CutCode = "changed"        // the instance is there and is not the one that was meant
	CutDied         CutCode = "died"           // the worker ended within the call: whether the call had its effect is unknown
	CutTimeout      CutCode = "timeout"        // the call outlived its context: whether it had its effect is unknown
	CutOther        CutCode = "other"
)
