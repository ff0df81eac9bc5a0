package metadata

import (
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
)

// WithSpecs are the CDI specs and the metadata files of all claims. A claim's files exist as long
// as its spec, so what removes a spec or finds one that a killed call left does the same for the
// files.
type WithSpecs struct {
	*cdi.Store
	Files *Files
}

// WriteMetadata writes the file of a request.
func (s WithSpecs) WriteMetadata(c Claim, r Request) error { return s.Files.Write(c, r) }

// RemoveClaim removes the claim's spec, and then the files that it names.
func (s WithSpecs) RemoveClaim(uid types.UID) error {
	if err := s.Store.RemoveClaim(uid); err != nil {
		return err
	}
	return s.Files.Remove(uid)
}

// Claims lists the claims that have a spec or files.
func (s WithSpecs) Claims() ([]types.UID, error) {
	specified, err := s.Store.Claims()
	if err != nil {
		return nil, err
	}
	described, err := s.Files.Claims()
	if err != nil {
		return nil, err
	}
	all := slices.Concat(specified, described)
	slices.Sort(all)
	return slices.Compact(all), nil
}
