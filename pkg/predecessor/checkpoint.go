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

// Claim is one that the reference driver has prepared, or had begun to.
type Claim struct {
	UID types.UID
	// Namespace and Name are known only of claims whose preparation was not finished. Pods are the names of those that use the claim.
	Namespace, Name string
	Pods            []string
	Devices         []Device
	// Daemons are the IDs of its MPS daemons; MPS and TimeSlices say that compute mode or time slices of its GPUs were set.
	Daemons         []string
	MPS, TimeSlices bool
}

// String names the claim as well as the file allows.
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

// Device is one device of such a claim. What is not known is empty.
type Device struct {
	// Name is the reference driver's.
	Name string
	// GPUUUID is the card, or the card of the partition; PCIBusID is the card's where it is known by that.
	GPUUUID, PCIBusID string
	// MIG is nil for what is no partition.
	MIG *MIG
}

// MIG is a partition that the reference driver has made. Its IDs are nil where an older version did not write them.
type MIG struct {
	UUID                             string
	GPUInstanceID, ComputeInstanceID *uint32
}

// UnreadableError says that a checkpoint is there and cannot be understood.
type UnreadableError struct{ Path, Reason string }

func (e *UnreadableError) Error() string {
	return fmt.Sprintf("the checkpoint %s of NVIDIA's reference driver cannot be understood (%s), and may list claims that hold any GPU: when no Pod on this node has a GPU from that driver any more, move the file away",
		e.Path, e.Reason)
}

// The file, as far as it matters here. V1 and V2 list claims alike.

type checkpointV struct {
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
		// Concrete is V2's. Info is V1's, and may know the partition's UUID alone.
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

// Parse reads a checkpoint. forgotten says that it was written before the node's last boot, so that nothing in it holds any more; V1 does not tell.
func Parse(raw []byte, driver, bootID string) (claims []Claim, forgotten bool, err error) {
	var versions map[string]json.RawMessage
	if err := json.Unmarshal(raw, &versions); err != nil {
		if len(bytes.TrimSpace(raw)) == 0 {
			err = errors.New("it is empty")
		}
		return nil, false, err
	}
	for key := range versions {
		if versionKey.MatchString(key) && key != "v1" && key != "v2" {
			return nil, false, fmt.Errorf("it has version %s, and v1 and v2 are known", key)
		}
	}
	newest := versions["v2"]
	if isNull(newest) {
		newest = versions["v1"]
	}
	if isNull(newest) {
		return nil, false, errors.New("it has neither v1 nor v2")
	}
	var v checkpointV
	if err := json.Unmarshal(newest, &v); err != nil {
		return nil, false, err
	}
	if v.NodeBootID != "" && v.NodeBootID != bootID {
		return nil, true, nil
	}
	for uid, c := range v.PreparedClaims {
		if uid == "" || strings.ContainsAny(string(uid), "/._") {
			return nil, false, fmt.Errorf("%q is no UID of a claim", uid)
		}
		read := c.read(uid, driver)
		for _, daemon := range read.Daemons {
			if len(validation.IsDNS1123Label(daemon)) > 0 { // administrators are told a command with it
				return nil, false, fmt.Errorf("%q is no ID of an MPS daemon", daemon)
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
	for _, r := range f.Status.ReservedFor {
		if r.Resource == "pods" {
			c.Pods = append(c.Pods, r.Name)
		}
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
	// A preparation that was begun may have got hold of anything that was allocated.
	if f.Status.Allocation != nil {
		for _, r := range f.Status.Allocation.Devices.Results {
			if r.Driver == driver && !named[r.Device] {
				c.Devices = append(c.Devices, Device{Name: r.Device})
			}
		}
	}
	return c
}

// read leaves a device of a kind that is not known without a card: it may be any.
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
