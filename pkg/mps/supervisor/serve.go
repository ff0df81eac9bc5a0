package supervisor

import (
	"encoding/json"
	"fmt"
	"net/http"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

// maxRequest limits the body of a request, in bytes. Every valid [mps.Daemon] is far shorter.
const maxRequest = 1 << 20

func (s *Supervisor) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+mps.Resource, func(w http.ResponseWriter, _ *http.Request) { respond(w, http.StatusOK, s.List()) })
	mux.HandleFunc("PUT "+mps.Resource+"/{id}", s.put)
	mux.HandleFunc("DELETE "+mps.Resource+"/{id}", s.delete)
	return mux
}

func (s *Supervisor) put(w http.ResponseWriter, r *http.Request) {
	var spec mps.Daemon
	decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRequest))
	// Refuse unknown fields, which a newer plugin may send. If the supervisor ignored such a field,
	// the plugin would believe that the setting is in effect.
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&spec); err != nil {
		respondError(w, http.StatusBadRequest, fmt.Errorf("the MPS supervisor on this node does not understand the request "+
			"(is it older than the plugin? delete its Pod when no client runs): %w", err))
		return
	}
	if id := r.PathValue("id"); spec.ID != id {
		respondError(w, http.StatusBadRequest, fmt.Errorf("the request is for MPS daemon %.100q but describes %.100q", id, spec.ID))
		return
	}
	if err := spec.Validate(); err != nil {
		respondError(w, http.StatusBadRequest, err)
		return
	}
	if err := s.Start(r.Context(), spec); err != nil {
		klog.FromContext(s.ctx).Error(err, "Failed to start MPS daemon", "daemon", spec.ID)
		respondError(w, http.StatusInternalServerError, err)
		return
	}
	respond(w, http.StatusOK, struct{}{})
}

func (s *Supervisor) delete(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	if !mps.ValidID(id) {
		respondError(w, http.StatusBadRequest, fmt.Errorf("%.100q cannot be the ID of an MPS daemon", id))
		return
	}
	if err := s.Stop(r.Context(), id); err != nil {
		klog.FromContext(s.ctx).Error(err, "Failed to stop MPS daemon", "daemon", id)
		respondError(w, http.StatusInternalServerError, err)
		return
	}
	respond(w, http.StatusOK, struct{}{})
}

func respondError(w http.ResponseWriter, code int, err error) {
	respond(w, code, mps.Failure{Error: err.Error()})
}

func respond(w http.ResponseWriter, code int, content any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(content) // This fails if the client has closed the connection.
}
