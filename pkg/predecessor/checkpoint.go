package predecessor

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
)

// Claim is a claim that NVIDIA's DRA driver prepared or began to prepare.
type Claim struct {
	UID types.UID
	// Namespace and Name are empty if the preparation finished, because the checkpoint then lacks
	// them. Pods has the names of the Pods that use the claim.
	Namespace, Name string
	Pods            []string
	// Preparation tells this preparation from a later one of the same claim: the UIDs of the Pods. The
	// checkpoint does not tell them apart if the claim is reserved for anything else, such as a
	// PodGroup. Then Parse leaves Preparation empty, and Store fills in the file's stamp.
	Preparation string
	Devices     []Device
	// Daemons has the IDs of the claim's MPS daemons. MPS is true if NVIDIA's DRA driver changed the
	// compute mode of the claim's GPUs, and TimeSlices is true if it changed their time slices.
	Daemons         []string
	MPS, TimeSlices bool
}

// String returns the claim's UID, its name if known, and its Pods.
func (c Claim) String() string {
	name := "claim " + string(c.UID)
	if c.Name != "" {
		name = fmt.Sprintf("claim %s/%s (UID %s)", c.Namespace, c.Name, c.UID)
	}
	if len(c.Pods) > 0 {
		name += " of Pod " + strings.Join(c.Pods, ", ")
	}
	return name
}

// Device is one device of a [Claim]. Fields that the checkpoint does not tell are empty.
type Device struct {
	// Name is the name that NVIDIA's DRA driver gave to the device.
	Name string
	// GPUUUID is the UUID of the device's GPU: the device itself, or the GPU that it is a partition
	// of. PCIBusID is the PCI address of that GPU.
	GPUUUID, PCIBusID string
	// MIG describes the partition. It is nil for a device that is not a partition.
	MIG *MIG
}

// MIG is a partition that NVIDIA's DRA driver created. GPUInstanceID and ComputeInstanceID are nil
// if an older version of that driver did not write them.
type MIG struct {
	UUID                             string
	GPUInstanceID, ComputeInstanceID *uint32
}

// UnreadableError means that the checkpoint exists but cannot be read.
type UnreadableError struct{ Path, Reason string }

func (e *UnreadableError) Error() string {
	return fmt.Sprintf("cannot read the checkpoint %s of NVIDIA's DRA driver (%s). "+
		"Its claims may still use any GPU: when no Pod on this node has a GPU from that driver any more, move the file away",
		e.Path, e.Reason)
}

// The types below have those fields of the checkpoint file that this driver reads. Versions v1 and
// v2 of the file list claims in the same way.

type checkpointVersion struct {
	NodeBootID     string                    `json:"nodeBootID"`
	PreparedClaims map[types.UID]claimInFile `json:"preparedClaims"`
}

type claimInFile struct {
	Name      string `json:"name"`
	Namespace string `json:"namespace"`
	Status    struct {
		Allocation *struct {
			Devices struct {
				Results []struct {
					Driver string `json:"driver"`
					Device string `json:"device"`
				} `json:"results"`
			} `json:"devices"`
		} `json:"allocation"`
		ReservedFor []struct {
			Resource string `json:"resource"`
			Name     string `json:"name"`
			UID      string `json:"uid"`
		} `json:"reservedFor"`
	} `json:"status"`
	PreparedDevices []struct {
		Devices     []deviceInFile `json:"devices"`
		ConfigState struct {
			MPSControlDaemonID string `json:"mpsControlDaemonID"`
			MPSApplied         bool   `json:"mpsApplied"`
			TimeSliceApplied   bool   `json:"timeSliceApplied"`
		} `json:"configState"`
	} `json:"preparedDevices"`
}

type deviceInFile struct {
	GPU *struct {
		Info   cardInFile `json:"info"`
		Device nameInFile `json:"device"`
	} `json:"gpu"`
	MIG *struct {
		// Version v2 of the checkpoint has the field Concrete. Version v1 has the field Info instead,
		// which may have only the UUID of the partition.
		Concrete *migInFile `json:"concrete"`
		Info     *migInFile `json:"info"`
		Device   nameInFile `json:"device"`
	} `json:"mig"`
	VFIO *struct {
		Info   cardInFile `json:"info"`
		Device nameInFile `json:"device"`
	} `json:"vfio"`
}

type cardInFile struct {
	UUID     string `json:"uuid"`
	PCIBusID string `json:"pciBusID"`
}

type migInFile struct {
	GI             *uint32 `json:"giId"`
	CI             *uint32 `json:"ciId"`
	MIGUUID        string  `json:"migUUID"`
	UUID           string  `json:"uuid"`
	ParentUUID     string  `json:"parentUUID"`
	ParentPCIBusID string  `json:"parentPCIBusID"`
}

type nameInFile struct{ DeviceName string }

var versionKey = regexp.MustCompile(`^v[0-9]+$`)

// Parse reads a checkpoint. outdated is true if the checkpoint was written before the node's last
// boot. Then claims is empty, because the boot ended all claims. Version v1 does not record the
// boot, so it is never outdated.
func Parse(raw []byte, driver, bootID string) (claims []Claim, outdated bool, err error) {
	var versions map[string]json.RawMessage
	if err := json.Unmarshal(raw, &versions); err != nil {
		if len(bytes.TrimSpace(raw)) == 0 {
			err = errors.New("the file is empty")
		}
		return nil, false, err
	}
	for key := range versions {
		if versionKey.MatchString(key) && key != "v1" && key != "v2" {
			return nil, false, fmt.Errorf("the file has version %s, only v1 and v2 are known", key)
		}
	}
	newest := versions["v2"]
	if isNull(newest) {
		newest = versions["v1"]
	}
	if isNull(newest) {
		return nil, false, errors.New("the file has neither v1 nor v2")
	}
	var v checkpointVersion
	if err := json.Unmarshal(newest, &v); err != nil {
		return nil, false, err
	}
	if v.NodeBootID != "" && v.NodeBootID != bootID {
		return nil, true, nil
	}
	for uid, c := range v.PreparedClaims {
		if uid == "" || strings.ContainsAny(string(uid), "/._") {
			return nil, false, fmt.Errorf("%q is not a claim UID", uid)
		}
		read := c.read(uid, driver)
		for _, daemon := range read.Daemons {
			if len(validation.IsDNS1123Label(daemon)) > 0 { // an Event quotes the ID in a shell command
				return nil, false, fmt.Errorf("%q is not the ID of an MPS daemon", daemon)
			}
		}
		claims = append(claims, read)
	}
	slices.SortFunc(claims, func(a, b Claim) int { return strings.Compare(string(a.UID), string(b.UID)) })
	return claims, false, nil
}

func isNull(raw json.RawMessage) bool { return len(raw) == 0 || string(raw) == "null" }

func (f claimInFile) read(uid types.UID, driver string) Claim {
	c := Claim{UID: uid, Namespace: f.Namespace, Name: f.Name}
	var pods []string
	for _, r := range f.Status.ReservedFor {
		if r.Resource == "pods" {
			c.Pods = append(c.Pods, r.Name)
			if r.UID != "" {
				pods = append(pods, r.UID)
			}
		}
	}
	if len(pods) == len(f.Status.ReservedFor) {
		slices.Sort(pods)
		c.Preparation = strings.Join(pods, "\n")
	}
	named := map[string]bool{}
	for _, group := range f.PreparedDevices {
		if id := group.ConfigState.MPSControlDaemonID; id != "" {
			c.Daemons = append(c.Daemons, id)
		}
		c.MPS = c.MPS || group.ConfigState.MPSApplied || group.ConfigState.MPSControlDaemonID != ""
		c.TimeSlices = c.TimeSlices || group.ConfigState.TimeSliceApplied
		for _, d := range group.Devices {
			device := d.read()
			named[device.Name] = true
			c.Devices = append(c.Devices, device)
		}
	}
	// The checkpoint has the allocation only of a claim whose preparation did not finish. That
	// preparation may have changed any allocated device.
	if f.Status.Allocation != nil {
		for _, r := range f.Status.Allocation.Devices.Results {
			if r.Driver == driver && !named[r.Device] {
				c.Devices = append(c.Devices, Device{Name: r.Device})
			}
		}
	}
	return c
}

// read converts a device from the checkpoint. If the kind of the device is unknown, the result
// names no GPU, so the caller must assume that the device may be on any GPU of the node.
func (f deviceInFile) read() Device {
	switch {
	case f.GPU != nil:
		return Device{Name: f.GPU.Device.DeviceName, GPUUUID: f.GPU.Info.UUID, PCIBusID: f.GPU.Info.PCIBusID}
	case f.VFIO != nil:
		return Device{Name: f.VFIO.Device.DeviceName, GPUUUID: f.VFIO.Info.UUID, PCIBusID: f.VFIO.Info.PCIBusID}
	case f.MIG != nil:
		d := Device{Name: f.MIG.Device.DeviceName, MIG: &MIG{}}
		if m := f.MIG.Info; m != nil {
			d.MIG.UUID, d.GPUUUID, d.PCIBusID = m.UUID, m.ParentUUID, m.ParentPCIBusID
		}
		if m := f.MIG.Concrete; m != nil {
			d.GPUUUID, d.PCIBusID = m.ParentUUID, m.ParentPCIBusID
			d.MIG = &MIG{UUID: m.MIGUUID, GPUInstanceID: m.GI, ComputeInstanceID: m.CI}
		}
		return d
	}
	return Device{}
}
