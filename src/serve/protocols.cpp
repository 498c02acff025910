// The protocols of the program, one line each.
#include "serve/service.h"

namespace plumb::serve {

const std::vector<ProtocolRoute>& protocol_routes() {
  static const std::vector<ProtocolRoute> routes = {};
  return routes;
}

}  // namespace plumb::serve
